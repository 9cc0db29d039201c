# SPDX-License-Identifier: Apache-2.0
"""``vllm-overlay probe`` on a server's metrics; tests/http/test_names.py asks a real one."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from vllm_overlay import cli
from vllm_overlay.cli import probe
from vllm_overlay.cli.probe import is_sound, names, tables
from vllm_overlay.server.api_client import Metrics
from vllm_overlay.server.interval import Interval

TIER, MULTI = "vllm:hybrid_offload", "vllm:kv_connector"


def text_of(factor=1, state=0, **more):
    """What a server with one CPU tier says; counters are ``factor`` times as high."""
    cpu = 'engine="0",connector="cpu"'
    lines = [
        f"{MULTI}_state{{{cpu}}} {state}",
        f"{MULTI}_load_weight{{{cpu}}} 0.95",
        f"{MULTI}_asked_tokens_total{{{cpu}}} {1000 * factor}",
        f"{MULTI}_offered_tokens_total{{{cpu}}} {750 * factor}",
        f"{MULTI}_chosen_total{{{cpu}}} {3 * factor}",
        f"{MULTI}_load_seconds_sum{{{cpu}}} {0.3 * factor}",
        f"{MULTI}_load_seconds_count{{{cpu}}} {3 * factor}",
        f'{MULTI}_errors_total{{{cpu},hook="take_events"}} {2 * factor}',
        f'{MULTI}_errors_total{{{cpu},hook="shutdown"}} 0',
        f"{TIER}_objects{{{cpu}}} 7",
        f"{TIER}_used_bytes{{{cpu}}} {1 << 20}",
        f"{TIER}_capacity_bytes{{{cpu}}} {4 << 20}",
        f"{TIER}_queried_tokens_total{{{cpu}}} {1000 * factor}",
        f"{TIER}_restored_tokens_total{{{cpu}}} {700 * factor}",
        f'{TIER}_lost_tokens_total{{{cpu},reason="state",group_kind="recurrent"}} {280 * factor}',
        f'{TIER}_lost_tokens_total{{{cpu},reason="prompt_end",group_kind=""}} {20 * factor}',
        f'{TIER}_lost_tokens_total{{{cpu},reason="window",group_kind="sliding"}} 0',
        f'{TIER}_first_token_seconds_sum{{{cpu},source="tier"}} {6 * factor}',
        f'{TIER}_first_token_seconds_count{{{cpu},source="tier"}} {3 * factor}',
        f'{TIER}_failed_loads_total{{{cpu},reason="checksum"}} {factor}',
        *(f"{name}{{{cpu}}} {value}" for name, value in more.items()),
    ]
    return "\n".join(lines) + "\n"


def interval(before, after):
    return Interval(None if before is None else Metrics(before), Metrics(after))


def row(found, title, number=0):
    names_of, *rows = found[title]
    return dict(zip(names_of, rows[number], strict=True))


def test_a_connector_that_has_offered_nothing_has_no_weight_yet():
    silent = "".join(line for line in text_of().splitlines(keepends=True) if "load_weight" not in line)
    assert row(tables(interval(None, silent)), "connectors")["weight"] == "-"


def test_tables_say_what_the_metrics_do():
    found = tables(interval(None, text_of()))
    assert row(found, "connectors") == {
        "connector": "cpu",
        "state": "serving",
        "weight": "0.95",
        "hit": "75.0%",
        "loaded": "0 tokens",
        "chosen": "3",
        "outbid": "0",
        "too slow": "0",
        "a load": "100.0 ms",
        "a lookup": "-",
    }
    tier = row(found, "tiers")
    assert (tier["used"], tier["full"], tier["objects"], tier["restored"]) == ("1.0 MiB", "25.0%", "7", "70.0%")
    assert found["tokens that were not restored, by reason"] == [
        ("reason", "cpu"),
        ("prompt_end", "20"),
        ("state (recurrent)", "280"),
    ]
    assert row(found, "time to first token, by where most of the prompt came from") == {
        "source": "tier",
        "cpu": "2.00 s of 3",
    }
    assert found["faults"][1:] == [("cpu", "load failed", "checksum", "1"), ("cpu", "exception", "take_events", "2")]


def test_an_interval_has_what_came_in_it():
    found = tables(interval(text_of(2), text_of(5)))
    assert row(found, "connectors")["chosen"] == "9"
    assert row(found, "tiers")["objects"] == "7"
    assert found["faults"][1][-1] == "3"


def test_nothing_came_in_an_interval_without_traffic():
    found = tables(interval(text_of(2), text_of(2)))
    assert row(found, "connectors")["hit"] == "-"
    assert set(found) == {"connectors", "tiers"}


def test_a_server_that_was_restarted_began_with_0_again():
    assert row(tables(interval(text_of(5), text_of(1))), "connectors")["chosen"] == "3"


def test_several_engines_add_up_but_for_their_state_and_for_what_they_may_share():
    two = text_of() + text_of(state=2).replace('engine="0"', 'engine="1"')
    found = tables(interval(None, two))
    assert row(found, "connectors")["chosen"] == "6"
    assert row(found, "connectors")["state"] == "out of service"
    held = row(found, "tiers")
    assert (held["used"], held["capacity"], held["objects"]) == ("1.0 MiB", "4.0 MiB", "7")
    assert not is_sound(interval(None, two))


def test_a_tier_that_has_paused_its_loads_is_not_sound():
    assert is_sound(interval(None, text_of()))
    assert not is_sound(interval(None, text_of(**{f"{TIER}_loads_paused": 1})))


def test_a_tier_that_has_no_room_anywhere_is_not_sound():
    full = text_of().replace(str(4 << 20), "0")
    assert f"{TIER}_capacity_bytes" in full
    assert not is_sound(interval(None, full))


def test_others_connectors_are_named_too():
    assert names(interval(None, f'{MULTI}_state{{connector="nixl"}} 0\n')) == ["nixl"]


@pytest.fixture
def server():
    """Serves what its ``text`` is."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            if self.path != "/metrics":
                self.send_error(404)
                return
            self.send_response(200)
            self.end_headers()
            self.wfile.write(self.server.text.encode())

        def log_message(self, *_):
            """Nothing on standard error."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as found:
        found.text = text_of()
        found.url = f"http://127.0.0.1:{found.server_port}"
        thread = threading.Thread(target=found.serve_forever)
        thread.start()
        yield found
        found.shutdown()
        thread.join()


@pytest.mark.parametrize(("state", "status"), [(0, 0), (2, 1)])
def test_its_status_says_whether_all_are_in_service(server, state, status, capsys):
    server.text = text_of(state=state)
    assert cli.main(["probe", server.url]) == status
    shown = capsys.readouterr().out
    assert shown.startswith("since the server's start\n\nconnectors\n")
    assert "state (recurrent)" in shown and "checksum" in shown


def test_json_is_one_object(server, capsys):
    assert cli.main(["probe", server.url, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["is_sound"] is True and found["cause"] == ""
    assert found["tiers"][0]["restored"] == "70.0%"


def test_a_tier_that_has_not_begun_is_told_from_none(server, capsys):
    """A lone connector's gauges come with its first step, its counters before."""
    server.text = f'{TIER}_stored_objects_total{{engine="0",connector="hybrid_disk"}} 0\n'
    assert cli.main(["probe", server.url]) == 0
    assert "nothing was restored: no request has come" in capsys.readouterr().out


def test_a_server_without_our_connectors_is_told_what_to_change(server, capsys):
    server.text = 'vllm:num_requests_running{engine="0"} 0\n'
    assert cli.main(["probe", server.url]) == 2
    assert "start it with a --kv-transfer-config" in capsys.readouterr().err


def test_nobody_answers(server, capsys):
    assert cli.main(["probe", "http://127.0.0.1:1"]) == 2
    assert "http://127.0.0.1:1/metrics was not answered" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("wrong", "works"),
    [
        (["ftp://x"], "give one such as http://"),
        (["http://x", "--watch", "0"], "give seconds from 0.1, such as --watch 5"),
        (["http://x", "--watch", "10s"], "'10s' is no interval: give seconds"),
        (["--watch", "http://x"], "'http://x' is no interval: give seconds from 0.1, such as --watch 5, after the URL"),
    ],
)
def test_wrong_usage(wrong, works, capsys):
    try:
        status = cli.main(["probe", *wrong])
    except SystemExit as left:
        status = left.code
    assert status == 2
    assert works in capsys.readouterr().err


def test_it_watches_until_ctrl_c_and_waits_for_a_server_that_is_away(server, capsys, monkeypatch):
    texts = iter([text_of(2), "no metrics {", text_of(5, state=2)])

    def sleep(seconds):
        assert seconds == 7
        server.text = next(texts, "")
        if not server.text:
            raise KeyboardInterrupt

    monkeypatch.setattr(probe.time, "sleep", sleep)
    assert cli.main(["probe", server.url, "--watch", "7", "--json"]) == 1
    shown = capsys.readouterr()
    chosen = [json.loads(line)["connectors"][0]["chosen"] for line in shown.out.splitlines()]
    assert chosen == ["3", "3", "9"]
    assert shown.err.count("; waiting") == 1


def test_where_nothing_was_restored_the_last_line_has_the_likeliest_cause(server, capsys):
    server.text = text_of(**{f"{TIER}_loads_paused": 1}).replace(" 700\n", " 0\n")
    assert cli.main(["probe", server.url]) == 1
    assert capsys.readouterr().out.endswith(
        "\nnothing was restored: so many reads have failed that loads are paused: look at the kernel's log and at the "
        "disk\n"
    )
