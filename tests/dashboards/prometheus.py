# SPDX-License-Identifier: Apache-2.0
"""A real Prometheus: the machine's own, or Debian's package, unpacked in the work tree without root."""

import shutil
import socket
import subprocess
import urllib.error
import urllib.request
from pathlib import Path

import yaml

from tests.dashboards.prometheus_api import PrometheusApi
from tests.waiting import PATIENCE_S, until
from tools.server_process import hold_port, port_of
from vllm_overlay.common.file_lock import locked_if_possible

REPOSITORY = Path(__file__).resolve().parents[2]
ALERTS = REPOSITORY / "dashboards" / "alerts.yml"
UNPACKED = REPOSITORY / ".prometheus"
DOWNLOAD_TIMEOUT_S = 300.0


class NotToBeHadError(RuntimeError):
    """There is no Prometheus here and none can be fetched; the message says why."""


def program(name: str) -> Path:
    """``prometheus`` or ``promtool``. Raises NotToBeHadError."""
    if found := shutil.which(name):
        return Path(found)
    path = UNPACKED / "usr" / "bin" / name
    if not path.exists():
        _fetch()
    return path


def _fetch() -> None:
    """Debian's package into ``UNPACKED``; whoever comes meanwhile waits."""
    if missing := [tool for tool in ("apt-get", "dpkg-deb") if shutil.which(tool) is None]:
        raise NotToBeHadError(f"no prometheus on the PATH, and no {' and no '.join(missing)} to fetch it with")
    UNPACKED.mkdir(exist_ok=True)
    with locked_if_possible(str(UNPACKED / "lock")):
        if not (UNPACKED / "usr" / "bin" / "promtool").exists():
            _run("apt-get", "download", "prometheus")
            package = max(UNPACKED.glob("prometheus_*.deb"), key=lambda path: path.stat().st_mtime)
            _run("dpkg-deb", "--extract", str(package), str(UNPACKED))


def _run(*command: str) -> None:
    try:
        done = subprocess.run(command, cwd=UNPACKED, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise NotToBeHadError(f"{' '.join(command)} took longer than {DOWNLOAD_TIMEOUT_S:.0f} s") from error
    if done.returncode:
        raise NotToBeHadError(f"{' '.join(command)}: {done.stderr.strip()}")


class Prometheus:
    """``with Prometheus(directory, target) as api``: it scrapes ``target``, host:port, with our alerts."""

    def __init__(self, directory: Path, target: str, scrape_interval_s: float = 1.0) -> None:
        self._directory = directory
        self._holder: socket.socket = hold_port()
        self._port = port_of(self._holder)
        interval = f"{scrape_interval_s * 1000:.0f}ms"
        config = {
            "global": {"scrape_interval": interval, "evaluation_interval": interval},
            "rule_files": [str(ALERTS)],
            "scrape_configs": [{"job_name": "vllm", "static_configs": [{"targets": [target]}]}],
        }
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "prometheus.yml").write_text(yaml.safe_dump(config))
        self._command = [
            str(program("prometheus")),
            f"--config.file={directory / 'prometheus.yml'}",
            f"--storage.tsdb.path={directory / 'data'}",
            f"--web.listen-address=127.0.0.1:{self._port}",
        ]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def __enter__(self) -> PrometheusApi:
        with (self._directory / "prometheus.log").open("wb") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log)
        try:
            until(self._is_ready, "Prometheus")
        except BaseException:
            self._stop()
            raise
        return PrometheusApi(self.url)

    def __exit__(self, *_: object) -> None:
        self._stop()

    def _is_ready(self) -> bool:
        if self._process is None or self._process.poll() is not None:
            raise RuntimeError(f"Prometheus has ended:\n{(self._directory / 'prometheus.log').read_text()}")
        try:
            with urllib.request.urlopen(f"{self.url}/-/ready", timeout=PATIENCE_S):
                return True
        except OSError:
            return False

    def _stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(20)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._holder.close()
