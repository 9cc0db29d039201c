# SPDX-License-Identifier: Apache-2.0
"""Configurations as charts, compose files, scripts and people write them: taken as meant, or refused with what works.

Each row goes through vLLM's own parser and its configuration. No row reads a weight, so a refusal comes at once.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.first_hour.start import Answer
from tests.python_path import REPOSITORY, python_path
from tests.waiting import PATIENCE_S
from tests.warm import WarmProcess
from vllm_overlay.config import GIB, KIB, MIB, TIB

pytestmark = pytest.mark.engine

ROOT = "/var/cache/vllm-kv"
OURS = "vllm_overlay.multi_connector"


@dataclass(frozen=True, slots=True)
class Row:
    """``refused``: words of the sentence. ``taken``: settings of each tier. One of them."""

    label: str
    arguments: list[str]
    refused: tuple[str, ...] = ()
    taken: tuple[dict[str, Any], ...] = ()


def tier(kind: Any = "cpu", /, **extra: Any) -> dict[str, Any]:
    return {"kv_connector": "HybridOffloadConnector", "kv_connector_extra_config": {"tier": kind, **extra}}


def alone(kind: Any = "cpu", /, **extra: Any) -> list[str]:
    return given({**tier(kind, **extra), "kv_role": "kv_both"})


def disk(**extra: Any) -> list[str]:
    return alone("disk", **{"root": ROOT, **extra})


def multi(*children: dict[str, Any], path: str | None = OURS, **extra: Any) -> list[str]:
    config = {
        "kv_connector": "MultiConnector",
        "kv_connector_module_path": path,
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": list(children), **extra},
    }
    return given(config)


def given(config: dict[str, Any] | str) -> list[str]:
    return ["--kv-transfer-config", config if isinstance(config, str) else json.dumps(config)]


def _size(written: Any, num_bytes: int | None) -> Row:
    label = f"a size {written!r}"
    if num_bytes is not None:
        return Row(label, alone(capacity_bytes=written), taken=({"capacity_bytes": num_bytes},))
    return Row(label, alone(capacity_bytes=written), (f"capacity_bytes={written!r} is not a size", '"4 GiB"'))


def _root(written: str, words: str, works: str = ROOT) -> Row:
    return Row(f"a root {written!r}", disk(root=written), (f"root={written!r} {words}", f"such as {works!r}"))


VLLMS_MULTI = 'write "kv_connector_module_path": "vllm_overlay.multi_connector" beside it'
FLAG = "--kv-offloading-size 1 would put vLLM's own connector in the place of"
OFFLOADING = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}

SIZES = [
    # Helm writes large numbers as floats.
    _size(6.442450944e10, 60 * GIB),
    _size("6.442450944e+10", 60 * GIB),
    _size(1e9, 10**9),
    _size("1e9", 10**9),
    _size(4294967296.0, 4 * GIB),
    _size("64424509440", 60 * GIB),
    _size(" 64424509440 ", 60 * GIB),
    _size(0, 0),
    # Kubernetes' units and common ones.
    _size("60Gi", 60 * GIB),
    _size("512Mi", 512 * MIB),
    _size("1Ti", TIB),
    _size("64Ki", 64 * KIB),
    _size("200G", 200 * 10**9),
    _size("512M", 512 * 10**6),
    _size("10GB", 10 * 10**9),
    _size("1TB", 10**12),
    _size("1.5Gi", 3 * GIB // 2),
    _size("1P", 10**15),
    _size("4gb", 4 * 10**9),
    _size("4g", 4 * 10**9),
    _size("20 gib", 20 * GIB),
    _size("20 GIB", 20 * GIB),
    _size(" 4 GiB\n", 4 * GIB),
    _size("4096B", 4096),
    _size("4096 bytes", 4096),
    # What is none.
    _size("", None),
    _size("4,5 GiB", None),
    _size("64,424,509,440", None),
    _size("-1", None),
    _size(-1, None),
    _size(1.5, None),
    _size("1.5", None),
    _size("60 GiB;", None),
    _size("50%", None),
    _size("$SIZE", None),
    _size("1e400", None),
    _size("9999999 TiB", None),
    _size("four GiB", None),
    _size("GiB", None),
    _size(True, None),
    _size([], None),
    Row("a size of null", alone(capacity_bytes=None), ("capacity_bytes=None", "leave it out for the default")),
    Row("a rate", disk(max_write_bytes_per_s="100MB/s"), taken=({"max_write_bytes_per_s": 10**8},)),
    Row("a rate of Helm", disk(max_write_bytes_per_s=1e8), taken=({"max_write_bytes_per_s": 10**8},)),
    Row("a size that is a rate", alone(capacity_bytes="100MB/s"), ("capacity_bytes='100MB/s' is not a size",)),
    Row(
        "every size of a tier",
        disk(capacity_bytes="1Ti", min_free_bytes="2G", staging_bytes="64Mi", device_buffer_bytes="1gi"),
        taken=(
            {"capacity_bytes": TIB, "min_free_bytes": 2 * 10**9, "staging_bytes": 64 * MIB, "device_buffer_bytes": GIB},
        ),
    ),
    Row("a size below a MultiConnector", multi(tier(capacity_bytes="6Gi")), taken=({"capacity_bytes": 6 * GIB},)),
    Row(
        "a wrong size below a MultiConnector",
        multi(tier(capacity_bytes="6 Gigs")),
        ("connector 'cpu'", "capacity_bytes='6 Gigs' is not a size"),
    ),
]

VALUES = [
    Row("a number in quotes", disk(read_threads="4"), taken=({"read_threads": 4},)),
    Row("a whole float", alone(speculative_snapshot_tokens=1.048576e6), taken=({"speculative_snapshot_tokens": MIB},)),
    Row("a whole float in quotes", alone(hybrid_chunk_size="64.0"), taken=({"hybrid_chunk_size": 64},)),
    Row("a float in quotes", alone(load_timeout_s="2.5"), taken=({"load_timeout_s": 2.5},)),
    Row("a weight in quotes", multi(tier(load_weight="0.8")), taken=({"load_weight": 0.8},)),
    Row("a weight in quotes, alone", alone(load_weight=" 0.8 "), taken=({"load_weight": 0.8},)),
    Row("a word in capitals", alone(load_failure_policy="Recompute"), taken=({"load_failure_policy": "recompute"},)),
    Row("a boolean in quotes", alone(store_decoded_tokens="true"), taken=({"store_decoded_tokens": True},)),
    Row("a boolean of Python", alone(store_decoded_tokens="False"), taken=({"store_decoded_tokens": False},)),
    Row("YAML's off", disk(direct_io=False), taken=({"direct_io": "off"},)),
    Row("switches in quotes", multi(tier(load="true", promote="False", min_tokens="512")), taken=({},)),
    Row("a boolean as a word", multi(tier(load="yes")), ("load='yes' of connector 'cpu' must be true or false",)),
    Row("a fraction", disk(read_threads=2.5), ("read_threads=2.5 of the disk tier must be a whole number from 1",)),
    Row("a number that is none", disk(read_threads="four"), ("read_threads='four' of the disk tier must be a whole",)),
    Row("a boolean for a number", disk(read_threads=True), ("read_threads=True of the disk tier must be a whole",)),
    Row("a whole float for attempts", alone(max_load_attempts="3.0"), taken=({"max_load_attempts": 3},)),
    Row("null", disk(read_threads=None), ("read_threads=None", "such as 4; leave it out for the default")),
    Row("a name as a number", disk(namespace=7), ("namespace=7 of the disk tier", 'put it into quotes: "7"')),
    Row("tier in capitals", alone("CPU"), ("tier='CPU' is not known", "did you mean cpu?")),
    Row("tier misspelt", disk(tier="dsk"), ("tier='dsk' is not known", "did you mean disk?")),
    Row("tier by another name", alone("fs", root_dir=ROOT), ("tier='fs' is not known", "did you mean disk?")),
    Row("tier by another name", alone("ram"), ("tier='ram' is not known", "did you mean cpu?")),
    Row("no tier", alone(None), ("tier=None is not known",)),
    Row("tier with a blank", alone("disk ", root=ROOT), ("tier='disk ' is not known", "did you mean disk?")),
    Row("tier by its device", alone("nvme", root=ROOT), ("tier='nvme' is not known", "did you mean disk?")),
    Row("two tiers in one", alone("cpu,disk"), ("tier='cpu,disk' is not known", '"cpu" or "disk"')),
    Row("a list of tiers", alone(["cpu", "disk"]), ("tier=['cpu', 'disk'] is not known", '"cpu" or "disk"')),
    Row("octal 010", disk(read_threads="010"), ("read_threads='010' of the disk tier must be a whole number from 1",)),
    Row("octal 0o4", disk(read_threads="0o4"), ("read_threads='0o4' of the disk tier must be a whole",)),
    Row("no thread", disk(read_threads=0), ("read_threads=0 of the disk tier must be a whole number from 1 to 64",)),
    Row("too many", disk(write_threads=10**9), ("write_threads=1000000000", "a whole number from 1 to 64, such as 2")),
    Row("YAML's on", disk(direct_io=True), ('direct_io=True of the disk tier must be "auto" or "off"',)),
    Row("a word in capitals, for a number", alone(hybrid_chunk_size="AUTO"), taken=({"hybrid_chunk_size": "auto"},)),
    Row("yes for true", alone(store_decoded_tokens="yes"), ("store_decoded_tokens='yes'", "must be true or false or")),
    Row("seconds 30s", alone(load_timeout_s="30s"), ("load_timeout_s='30s' of the cpu tier must be a number above",)),
    Row("0 s", alone(load_timeout_s=0), ("load_timeout_s=0 of the cpu tier must be a number above 0, such as 30",)),
    Row("a weight of NaN", alone(load_weight="nan"), ("load_weight=nan of connector 'cpu' must be \"auto\" or a",)),
    Row("weight of inf", alone(load_weight=float("inf")), ("load_weight=inf of connector 'cpu' must be \"auto\" or",)),
    Row("a weight below 0", multi(tier(load_weight=-0.5)), ("load_weight=-0.5 of connector 'cpu'", "of at least 0")),
    Row("a share as a size", disk(min_free_bytes="10%"), ("min_free_bytes='10%' is not a size",)),
    Row("no number as a size", alone(capacity_bytes=float("nan")), ("capacity_bytes=nan is not a size",)),
    Row("capitals in LRU", disk(eviction_policy="LRU"), ("eviction_policy='LRU' is not known", "did you mean lru?")),
]

KEYS = [
    Row("OffloadingConnector's", alone(cpu_bytes_to_use=1), ("'cpu_bytes_to_use'", "did you mean capacity_bytes?")),
    Row(
        "llm-d's",
        disk(block_size=256, threads_per_gpu=64, shared_storage_path="/mnt/x", spec_name="SharedStorage"),
        (
            "unknown settings 'block_size', 'shared_storage_path', 'spec_name', 'threads_per_gpu' of the disk tier",
            "did you mean hybrid_chunk_size for block_size, root for shared_storage_path, tier for spec_name, "
            "read_threads for threads_per_gpu?",
        ),
    ),
    Row(
        "LMCache's",
        alone(local_cpu=True, max_local_cpu_size=5.0, chunk_size=256),
        ("'chunk_size', 'local_cpu', 'max_local_cpu_size'", "hybrid_chunk_size for chunk_size", "capacity_bytes for"),
    ),
    Row("LMCache's disk", disk(max_local_disk_size=5.0), ("did you mean capacity_bytes?",)),
    Row("nobody's", alone(lazy_offload=True), ("unknown setting 'lazy_offload' of the cpu tier: it takes tier, ",)),
    Row("camel case", disk(readThreads=4), ("unknown setting 'readThreads'", "did you mean read_threads?")),
    Row("hyphens", alone(**{"capacity-bytes": 1}), ("'capacity-bytes'", "did you mean capacity_bytes?")),
    Row("capitals", alone(CAPACITY_BYTES=1), ("'CAPACITY_BYTES'", "did you mean capacity_bytes?")),
    Row(
        "two typing errors",
        disk(capacity_byte=1, read_thread=4),
        ("unknown settings 'capacity_byte', 'read_thread'", "capacity_bytes for capacity_byte", "read_threads for"),
    ),
    Row(
        "below a MultiConnector",
        multi(tier(), tier("disk", root=ROOT, root_dir="/x", io_threads=3)),
        ("connector 'disk': unknown settings 'io_threads', 'root_dir'", "read_threads for io_threads"),
    ),
    Row(
        "the MultiConnector's in a tier",
        multi(tier(control_file="/x")),
        ("unknown setting 'control_file'", "belongs in the kv_connector_extra_config of the MultiConnector"),
    ),
    Row(
        "a tier's in the MultiConnector",
        multi(tier(), tier="cpu", capacity_bytes=1, load_weight=1),
        ("'capacity_bytes', 'load_weight', 'tier' of the MultiConnector", "capacity_bytes belongs in the kv_conn"),
    ),
    Row(
        "a child's, of a connector alone",
        alone(min_tokens=5),
        ("unknown setting 'min_tokens'", "min_tokens belongs in a connector below a MultiConnector"),
    ),
    Row("a field of the entry inside", alone(kv_role="kv_both"), ("kv_role belongs in the entry itself",)),
    Row("a flag of vLLM", alone(prefix_match_unit=64), ("vLLM's flag --prefix-match-unit",)),
    Row(
        "a tier beside its settings",
        multi({"kv_connector": "HybridOffloadConnector", "tier": "cpu"}),
        ("unknown setting 'tier' of connector 0", "tier belongs in this connector's kv_connector_extra_config"),
    ),
    Row("no settings", multi({"kv_connector": "HybridOffloadConnector"}), ("tier is not set", '"cpu" or "disk"')),
    Row("none, alone", given({"kv_connector": "HybridOffloadConnector", "kv_role": "kv_both"}), ("tier is not",)),
    Row(
        "JSON in a string",
        multi({"kv_connector": "HybridOffloadConnector", "kv_connector_extra_config": '{"tier": "cpu"}'}),
        ("kv_connector_extra_config of connector 0", "must be a mapping"),
    ),
    Row(
        "JSON in a string at the top",
        given({"kv_connector": "HybridOffloadConnector", "kv_role": "kv_both", "kv_connector_extra_config": "{}"}),
        ("kv_connector_extra_config", "dict_type"),
    ),
    Row(
        "children in a string",
        multi(connectors=json.dumps([tier()])),
        ("connectors='[{", "must be a list of mappings", "it is JSON inside a string: leave the outer quotes out"),
    ),
    Row("children in a mapping", multi(connectors={"cpu": tier()}), ("must be a list of mappings",)),
]

ROOTS = [
    _root("kv", "depends on the directory that the server is started in", str(REPOSITORY / "kv")),
    _root("./kv", "depends on the directory", str(REPOSITORY / "./kv")),
    _root("file:///var/kv", "is a URL", "/var/kv"),
    _root("file:/var/my%20kv", "is a URL", "/var/my kv"),
    _root("s3://bucket/kv", "is a URL"),
    _root("hdfs://host/kv", "is a URL"),
    _root("$HOME/kv", "holds $HOME, which nobody has replaced", "/home/somebody/kv"),
    _root("${HOME}/kv", "holds ${HOME}, which", "/home/somebody/kv"),
    _root("$(KV_DIR)/kv", "holds $(KV_DIR), which nobody has replaced"),
    _root("/mnt/$KV_OF_NOBODY", "holds $KV_OF_NOBODY, which nobody has replaced"),
    _root("/mnt/{{ .Values.kv }}", "holds {{ .Values.kv }}, which"),
    _root("/mnt/<your-volume>", "holds <your-volume>, which"),
    _root("%KV_DIR%", "holds %KV_DIR%, which"),
    _root('"/var/kv"', "has quotes of its own", "/var/kv"),
    _root("~nobody-of-this-name/kv", "is in the home of a user who has none here"),
    _root("/var/\0kv", "holds the character '\\x00'"),
    _root("/mnt/a\nb", "holds the character '\\n'"),
    _root("`pwd`/kv", "holds `pwd`, which nobody has replaced"),
    _root("/mnt/@KV_DIR@", "holds @KV_DIR@, which nobody has replaced"),
    _root("/mnt/*/kv", "holds *, which nobody has replaced"),
    _root("C:\\kv", "is a path of Windows"),
    _root("c:/kv", "is a path of Windows"),
    _root("\\\\server\\kv", "is a path of Windows"),
    _root("/mnt/kv:1TiB", "ends with a size, which has a setting of its own", "/mnt/kv"),
    _root("/host/kv:/kv", "is more than one path", "/host/kv"),
    _root("/mnt/a, /mnt/b", "is more than one path", "/mnt/a"),
    Row("2 roots", disk(root=["/mnt/a", "/mnt/b"]), ("root=['/mnt/a', '/mnt/b'] of the disk tier must be a string",)),
    Row("a root from a file of Windows", disk(root="\ufeff/tmp/kv\r\n"), taken=({"root": "/tmp/kv"},)),
    Row("a root with a colon", disk(root="/mnt/kv:a"), taken=({"root": "/mnt/kv:a"},)),
    Row("a root in the home", disk(root="~/kv"), taken=({"root": "/home/somebody/kv"},)),
    Row("a root with blanks around", disk(root="  /tmp/kv\n"), taken=({"root": "/tmp/kv"},)),
    Row("a root with a slash", disk(root="/tmp/kv/"), taken=({"root": "/tmp/kv/"},)),
    Row("a root in shared memory", disk(root="/dev/shm/kv"), taken=({"root": "/dev/shm/kv"},)),
    Row("a root with a dollar", disk(root="/mnt/a$/kv"), taken=({"root": "/mnt/a$/kv"},)),
    Row("an empty root", disk(root=""), ("root='' of the disk tier must be a string that is not empty", ROOT)),
    Row("a blank root", disk(root="  "), ("root='  ' of the disk tier must be a string that is not empty", ROOT)),
    Row("a root of null", disk(root=None), ("root=None of the disk tier must be a string", ROOT)),
    Row("no root", alone("disk"), ("root of the disk tier is not set", ROOT)),
    Row(
        "one root, written twice",
        multi(tier("disk", root="/tmp/kv"), tier("disk", root="/tmp/kv/")),
        ("have one root, '/tmp/kv'",),
    ),
    Row("another file", disk(encryption_key_file="$HOME/key"), ("encryption_key_file='$HOME/key' holds $HOME",)),
    Row("a file at home", disk(encryption_key_file="~/key"), taken=({"encryption_key_file": "/home/somebody/key"},)),
    Row("a file of the MultiConnector", multi(tier(), control_file="sw.json"), ("control_file='sw.json' depends on",)),
    Row("no file", multi(tier(), control_file=""), taken=({"tier": "cpu"},)),
]

CONNECTORS = [
    Row(
        "a class misspelt",
        given({**tier(), "kv_connector": "HybridOfloadConnector", "kv_role": "kv_both"}),
        ("kv_connector='HybridOfloadConnector' is not there", "did you mean HybridOffloadConnector?"),
    ),
    Row(
        "a module misspelt",
        multi(tier(), path="vllm_overlay.multiconnector"),
        ("kv_connector_module_path='vllm_overlay.multiconnector' is not there", f"MultiConnector in {OURS}"),
    ),
    Row(
        "a module path left empty",
        given({**tier(), "kv_connector_module_path": "", "kv_role": "kv_both"}),
        ("kv_connector_module_path='' is not there: ours are ",),
    ),
    Row(
        "a module with its class",
        multi(tier(), path=f"{OURS}.MultiConnector"),
        (f"kv_connector_module_path='{OURS}.MultiConnector' is not there", f"MultiConnector in {OURS}"),
    ),
    Row("the flag beside a tier", [*alone(), "--kv-offloading-size", "1"], (FLAG, '"capacity_bytes": "1 GiB"')),
    Row("the flag beside ours", [*multi(tier()), "--kv-offloading-size", "1"], (FLAG, "remove the flag")),
    Row("and a backend", [*multi(tier()), "--kv-offloading-size", "1", "--kv-offloading-backend", "lmcache"], (FLAG,)),
    Row(
        "the flag, and the hybrid manager on",
        [*alone(), "--kv-offloading-size", "1", "--no-disable-hybrid-kv-cache-manager"],
        (FLAG,),
    ),
    Row("an unknown key, and the hybrid manager on", [*alone(x=1), "--no-disable-hybrid-kv-cache-manager"], ("'x'",)),
    Row("the flag alone", ["--kv-offloading-size", "1"], taken=()),
    Row("the flag beside vLLM's", [*given(OFFLOADING), "--kv-offloading-size", "1"], taken=()),
    Row("vLLM's MultiConnector over a tier", multi(tier(), path=None), (VLLMS_MULTI, "a HybridOffloadConnector")),
    Row(
        "the same, with more of ours",
        multi({**tier(), "kv_role": "kv_both"}, path=None, control_file="/tmp/x", lookup_timeout_ms=5),
        (VLLMS_MULTI,),
    ),
    Row("the same, misspelt", multi({**tier(), "kv_connector": "HybridOfloadConnector"}, path=None), (VLLMS_MULTI,)),
    Row("ours in vLLM's", multi(OFFLOADING, path=None, control_file="/x"), (VLLMS_MULTI, "setting control_file")),
    Row(
        "a child's setting in vLLM's",
        multi({**OFFLOADING, "kv_connector_extra_config": {"load_weight": 1}}, path=None),
        (VLLMS_MULTI, "the setting load_weight"),
    ),
    Row("vLLM's MultiConnector over vLLM's", multi(OFFLOADING, path=None), taken=()),
    Row("our class by its own name", given({**tier(), "kv_role": "kv_both"}), taken=({"tier": "cpu"},)),
    Row(
        "dotted flags",
        [
            "--kv-transfer-config.kv_connector=HybridOffloadConnector",
            "--kv-transfer-config.kv_role=kv_both",
            "--kv-transfer-config.kv_connector_extra_config.tier=cpu",
            "--kv-transfer-config.kv_connector_extra_config.capacity_bytes=1Gi",
        ],
        taken=({"tier": "cpu", "capacity_bytes": GIB},),
    ),
    Row("no role", given(tier()), ("Please specify kv_role",)),
    Row("a role of null", given({**tier(), "kv_role": None}), ("Please specify kv_role",)),
    Row("a role misspelt", given({**tier(), "kv_role": "both"}), ("kv_role", "'kv_both' or 'kv_consumer'")),
    Row(
        "a child's role misspelt",
        multi({**tier(), "kv_role": "both"}),
        ("connector 0 cannot be configured: kv_role='both'", "'kv_both'"),
    ),
    Row("a newline at the end", given(json.dumps({**tier(), "kv_role": "kv_both"}) + "\n"), taken=({"tier": "cpu"},)),
    Row("quotes of its own", given(f"'{alone()[1]}'"), ("Invalid JSON",)),
    Row("JSON in a string of JSON", given(json.dumps(alone()[1])), ("Input should be an object",)),
    Row("a comma too many", given(alone()[1][:-1] + ",}"), ("Invalid JSON: trailing comma",)),
    Row("YAML", given("{kv_connector: HybridOffloadConnector, kv_role: kv_both}"), ("Invalid JSON",)),
    Row("a file of YAML", given("/etc/vllm/kv.yaml"), ("Invalid JSON", "/etc/vllm/kv.yaml")),
    Row("a list", given(f"[{alone()[1]}]"), ("Input should be an object",)),
    Row("the flag twice", [*alone("disk", root=ROOT), *alone("cpu")], taken=({"tier": "cpu"},)),
    Row("a setting twice", given(alone(name="a")[1].replace('"name"', '"name": "b", "name"')), taken=({"name": "a"},)),
    Row(
        "a module as a file",
        multi(tier(), path="vllm_overlay/multi_connector.py"),
        ("kv_connector_module_path='vllm_overlay/multi_connector.py' is not there", f"MultiConnector in {OURS}"),
    ),
    Row(
        "a class with its module",
        given({**tier(), "kv_connector": "vllm_overlay.connector.HybridOffloadConnector", "kv_role": "kv_both"}),
        ("is not there", "did you mean HybridOffloadConnector?"),
    ),
    Row(
        "a tier in the MultiConnector's module",
        given({**tier(), "kv_connector_module_path": OURS, "kv_role": "kv_both"}),
        (f"kv_connector='HybridOffloadConnector' in kv_connector_module_path='{OURS}' is not there", "ours are"),
    ),
    Row("no children", multi(), ("the MultiConnector has no children: set kv_connector_extra_config.connectors to",)),
    Row("children of null", multi(connectors=None), ("the MultiConnector has no children",)),
    Row("a child of null", multi(connectors=[tier(), None]), ("must be a list of mappings",)),
    Row("a child by its name alone", multi(connectors=["cpu"]), ("connectors=['cpu']", "must be a list of mappings")),
    Row("no class", multi({"kv_role": "kv_both"}), ("kv_connector=None of connector 0 must be a class name",)),
    Row("one tier twice", multi(tier(), tier()), taken=({"name": "cpu"}, {"name": "cpu#2"})),
    Row("a directory as control file", multi(tier(), control_file="/tmp"), ("control_file='/tmp' of the Multi",)),
    Row("underscores", ["--kv_transfer_config", alone()[1]], taken=({"tier": "cpu"},)),
]

ROWS = [*SIZES, *VALUES, *KEYS, *ROOTS, *CONNECTORS]


@pytest.fixture(scope="module")
def answers(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Answer]:
    """Of all rows, from one process."""
    directory = tmp_path_factory.mktemp("start")
    cases, found = directory / "cases", directory / "answers"
    cases.write_bytes(msgspec.json.encode([row.arguments for row in ROWS]))
    arguments = ["-m", "tests.first_hour.start", str(tiny_model), str(cases), str(found)]
    environment = {**os.environ, "PYTHONPATH": python_path()}
    with WarmProcess(arguments, environment, REPOSITORY, log := directory / "log", is_spoken_to=False) as process:
        assert process.wait(PATIENCE_S) == 0, log.read_text()[-4000:]
    return msgspec.json.decode(found.read_bytes(), type=list[Answer])


@pytest.mark.parametrize("number", range(len(ROWS)), ids=[row.label for row in ROWS])
def test_what_is_written_is_taken_as_meant_or_refused_with_what_works(number: int, answers: list[Answer]) -> None:
    row, answer = ROWS[number], answers[number]
    if row.refused:
        assert [words for words in row.refused if words not in answer.refusal] == [], answer
    else:
        assert not answer.refusal
        found = [{name: one.get(name) for name in wanted} for wanted, one in zip(row.taken, answer.tiers, strict=True)]
        assert found == list(row.taken)
