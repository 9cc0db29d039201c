# SPDX-License-Identifier: Apache-2.0
"""What the pages name is there: commands, flags, settings, metrics, files, anchors."""

import argparse
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from devtools import settings_page
from devtools.docs.commands import commands
from devtools.docs.generated import parts_of
from devtools.docs.page import Page
from devtools.docs_check import check, files_of, main, pages_of
from tests.python_path import REPOSITORY
from tests.transfer_config import accepted_tiers

PAGES = [Page.read(REPOSITORY, path) for path in pages_of(REPOSITORY)]
SERVERS = (("vllm", "serve"), ("python", "-m", "vllm.entrypoints.openai.api_server"))
FILE = re.compile(r"\$\(cat (\S+)\)")
PLACEHOLDER_FILES = ("config.json",)
"""What a reader would have made."""


def test_the_page_of_settings_lists_each_with_its_default_and_meaning() -> None:
    assert parts_of(settings_page.PAGE.read_text()) == {"settings": settings_page.tables()}


def test_nothing_is_wrong_with_the_pages(capsys: pytest.CaptureFixture[str]) -> None:
    status = main([])
    assert (capsys.readouterr().out, status) == ("", 0)


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A small repository: what the checks look names up in is that of this one."""
    for name in ("Makefile", "vllm_overlay", "tools", "bench", "devtools", "tests", "patches"):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "other.md").write_text("# Other\n\n## Is it `here`, now?\n\n## Twice\n\n## Twice\n")
    return tmp_path


GOOD = """\
# A page

A sentence with a [link](other.md#is-it-here-now), [another](other.md#twice-1) and
[a third](#a-page). This list has no fault:

- `make test TESTS=tests/planner` and `vllm-overlay stats ROOT --verify --remove`
- `python -m bench.serving TRACE --rounds 3`, `python tools/demo.py --keep`
- `python -m vllm_overlay stats ROOT --json`
- `tests/test_docs.py`, `planner/objects.py`, `tests/*.py`, `tests/test_versions.py::rows_of`
- `vllm_overlay.config.TierSettings`, `KVTransferConfig`, `max_num_seqs`, `_restore_unit_tokens`
- `--max-num-seqs`, `vllm:hybrid_offload_*`, `vllm:hybrid_offload_lookups_total`
- [a link](other.md#twice)

| a cell | another |
| --- | --- |

```bash
python -m vllm_overlay.patching --status
vllm-overlay plan MODEL \\
  --cpu 8GiB
```
"""


def test_a_page_without_a_fault_has_no_finding(clone: Path) -> None:
    page = clone / "docs" / "page.md"
    page.write_text(GOOD)
    assert list(check(clone, [page])) == []


@pytest.mark.parametrize(
    ("text", "line", "what"),
    [
        ("See [it](no.md).", 1, "link to no.md: no such file"),
        ("A\n[link over\na line](no.md).", 2, "link to no.md: no such file"),
        ("See ![a picture](no.png).", 1, "link to no.png: no such file"),
        ("See [it](../../outside).", 1, "link to ../../outside: no such file"),
        ("See [it](other.md#is-it-there).", 1, "link to other.md#is-it-there: no heading"),
        ("See [it](other.md#twice-2).", 1, "link to other.md#twice-2: no heading"),
        ("See [it](#here).", 1, "link to #here: no heading"),
        ("`tests/test_nothing.py`", 1, "no such file"),
        ("`planner/nothing.py`", 1, "no such file"),
        ("`tests/no*.py`", 1, "no such file"),
        ("`tests/test_docs.py::test_other`", 1, "tests/test_docs.py has no test_other"),
        ("`vllm_overlay.nothing`", 1, "there is no nothing in vllm_overlay"),
        ("`bench.serving.no_name`", 1, "there is no no_name in bench/serving"),
        ("`make nothing`", 1, "the Makefile has no target nothing"),
        ("`make test NOTHING=1`", 1, "the Makefile does not use NOTHING"),
        ("`vllm-overlay nothing`", 1, "there is no sub-command nothing"),
        ("`vllm-overlay probe URL --turns 3`", 1, "it has no --turns"),
        ("`python -m vllm_overlay stats ROOT --watch`", 1, "it has no --watch"),
        ("`python -m vllm_overlay plan MODEL --dtype half --watch-closely`", 1, "it has no --watch-closely"),
        ("`python -m bench.nothing`", 1, "there is no module bench.nothing"),
        ("`python -m vllm_overlay.planner`", 1, "vllm_overlay.planner has no __main__.py"),
        ("`python -m bench.serving --watch`", 1, "it has no --watch"),
        ("`python tools/nothing.py`", 1, "there is no tools/nothing.py"),
        (
            "```\nX=1 python tools/demo.py \\\n  --keep && .venv/bin/python tools/demo.py --watch\n```",
            2,
            "it has no --watch",
        ),
        ("```\ncat > x <<'E'\nE\nmake nothing\n```", 4, "the Makefile has no target nothing"),
        ("`vllm:hybrid_offload_nothing`", 1, "has no such metric"),
        ("```\nvllm:kv_connector_nothing_*\n```", 2, "has no such metric"),
        ("`no_such_setting: 1`", 1, "is called no_such_setting"),
        ("`NoClassOfThisName`", 1, "is called NoClassOfThisName"),
        ("`--no-such-flag`", 1, "is called --no-such-flag"),
    ],
)
def test_what_is_wrong_is_found_and_its_line_named(clone: Path, text: str, line: int, what: str) -> None:
    page = clone / "docs" / "page.md"
    page.write_text(text + "\n")
    found = list(check(clone, [page]))
    assert [(finding.page, finding.line) for finding in found if what in finding.what] == [("docs/page.md", line)], (
        found
    )


ALERTS = """\
groups:
  # Thresholds: docs/other.md.
  - name: vllm-overlay
    rules:
      - alert: Full
        expr: max by (model_name) (vllm:hybrid_offload_used_bytes) > 0
        annotations:
          description: "Raise capacity_bytes of {{ $labels.connector }}; vllm-overlay plan says what it holds."
          summary: "It drops {{ $value | humanizePercentage }}: run vllm-overlay stats ROOT --verify on the root."
"""


@pytest.mark.parametrize(
    ("shown", "changed", "line", "what"),
    [
        ("capacity_bytes", "capacity_bytes", 0, ""),
        ("capacity_bytes", "no_such_setting", 8, "is called no_such_setting"),
        ("overlay plan", "overlay nothing", 8, "there is no sub-command nothing"),
        ("--verify", "--watch", 9, "it has no --watch"),
        ("--verify on", "on vllm:kv_connector_nothing of", 9, "has no such metric"),
        ("docs/other.md", "docs/nothing.md", 2, "no such file"),
    ],
)
def test_what_alerts_name_is_there(clone: Path, shown: str, changed: str, line: int, what: str) -> None:
    (clone / "dashboards").mkdir()
    (clone / "dashboards" / "alerts.yml").write_text(ALERTS.replace(shown, changed))
    found = list(check(clone, files_of(clone)))
    assert {(finding.page, finding.line) for finding in found} == ({("dashboards/alerts.yml", line)} if line else set())
    assert not line or any(what in finding.what for finding in found), found


def test_the_command_says_page_line_and_fault_and_has_a_status(clone: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (clone / "docs" / "page.md").write_text("See\n[it](no.md).\n")
    assert main(["--root", str(clone), "docs/page.md"]) == 1
    assert capsys.readouterr().out == "docs/page.md:2: link to no.md: no such file\n"
    assert main(["--root", str(clone), "docs/other.md"]) == 0
    assert main(["--root", str(clone)]) == 1
    assert main(["--root", str(clone), "docs/none.md"]) == 2
    assert "none.md" in capsys.readouterr().err


def words_of(program: tuple[str, ...]) -> Iterator[tuple[str, int, list[str]]]:
    """Page, line and arguments of each command that begins so."""
    for page in PAGES:
        for command in commands(page):
            words = [command.words[0].rsplit("/", 1)[-1], *command.words[1:]]
            if tuple(words[: len(program)]) == program:
                yield page.name, command.line, words[len(program) :]


def unknown_options(parser: argparse.ArgumentParser, words: list[str]) -> list[str]:
    options = words[: words.index("--")] if "--" in words else words
    return [
        word for word in options if word.startswith("--") and word.split("=")[0] not in parser._option_string_actions
    ]


@pytest.fixture(scope="module")
def server_parser() -> argparse.ArgumentParser:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser: argparse.ArgumentParser = make_arg_parser(FlexibleArgumentParser())
    return parser


def test_servers_on_the_pages_have_options_that_vllm_knows(server_parser: argparse.ArgumentParser) -> None:
    servers = [(page, line, words) for program in SERVERS for page, line, words in words_of(program)]
    assert len(servers) >= 3
    assert [
        (page, line, unknown) for page, line, words in servers if (unknown := unknown_options(server_parser, words))
    ] == []
    assert unknown_options(server_parser, ["--prefix-match-unit=64", "--nothing"]) == ["--nothing"]


def transfer_configs() -> Iterator[tuple[str, int, Any]]:
    """Page, line and value of each ``--kv-transfer-config``, and of each JSON that stands alone."""
    for page in PAGES:
        for block in page.code_blocks:
            if block.language == "json":
                yield page.name, block.line, json.loads(block.text)
            for text in re.findall(r"<<'EOF'\n(\{.*?\n\})\nEOF", block.text, re.DOTALL):
                yield page.name, block.line, json.loads(text)
        for command in commands(page):
            if "--kv-transfer-config" in command.words[:-1]:
                value = command.words[command.words.index("--kv-transfer-config") + 1]
                if value.startswith("{"):
                    yield page.name, command.line, json.loads(value)


def accepted(value: Any) -> bool:
    """A whole configuration, one with which a MultiConnector's child begins, or the settings of a tier."""
    if "kv_connector" in value:
        accepted_tiers(value)
    elif "tier" in value:
        accepted_tiers(
            {"kv_connector": "HybridOffloadConnector", "kv_role": "kv_both", "kv_connector_extra_config": value}
        )
    elif "connectors" in value:
        extra = {"kv_connector": "MultiConnector", "kv_connector_module_path": "vllm_overlay.multi_connector"}
        accepted_tiers({**extra, "kv_role": "kv_both", "kv_connector_extra_config": value})
    else:
        return False
    return True


CONFIGS = list(transfer_configs())


@pytest.mark.parametrize("config", CONFIGS, ids=[f"{page}:{line}" for page, line, _ in CONFIGS])
def test_a_configuration_on_a_page_is_accepted(config: tuple[str, int, Any]) -> None:
    _, _, value = config
    if not accepted(value):
        assert isinstance(value, dict)


def test_configurations_are_found_on_the_pages_and_wrong_ones_refused() -> None:
    assert {"README.md", "docs/configuration.md"} <= {page for page, _, _ in CONFIGS}
    for wrong in ({"tier": "cpu", "capacity": 1}, {"tier": "disk"}, {"connectors": [{"kv_connector": "No"}]}):
        with pytest.raises(Exception, match=r"capacity|root|No"):
            accepted(wrong)


def test_files_that_a_server_reads_its_configuration_from_are_there() -> None:
    made = {path for page in PAGES for path in re.findall(r"cat > (\S+)", page.text)}
    named = {path for page in PAGES for path in FILE.findall(page.text)}
    assert [path for path in named - made if not (REPOSITORY / path).is_file() and path not in PLACEHOLDER_FILES] == []
