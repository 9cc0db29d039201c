# SPDX-License-Identifier: Apache-2.0
"""Packs vLLM for CUDA with the patch series, the packages it needs and this project into one archive below 64 MiB.

    python tools/gpu_bundle.py [--directory .gpu-bundle] [--architecture 90]

For a machine with a GPU that has torch 2.11 (CUDA 13), Triton 3.6, transformers 5.17 and Python 3.12, and no package
index. pip downloads from the index that it is configured for. What pip brought stays in the directory, so a second run
downloads nothing. Device code of other architectures is zeroed, and compiled parts that the ladder does not need stay
behind: this is for trying our connector, not for serving.

Exit status 0: the archive is there; 1: it is too large, or something did not go as it should.
"""

import argparse
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.fat_binary import keep_architecture
from vllm_overlay.versions import VLLM

REPOSITORY = Path(__file__).resolve().parent.parent
MAX_BYTES = 64 * 2**20
NAME = "gpu-bundle"
PLATFORMS = ("manylinux_2_31", "manylinux_2_28", "manylinux_2_24", "manylinux_2_17", "manylinux2014")
WITH_DEVICE_CODE = {"_C_stable_libtorch": True, "_moe_C_stable_libtorch": False, "vllm_flash_attn/_vllm_fa3_C": True}
"""And whether PTX stays for kernels without machine code. That of the experts' kernels is too large: no mixture of
experts runs. Without FlashAttention 3 vLLM's import of its attention backends fails."""
WITHOUT_DEVICE_CODE = ("spinloop", "cumem_allocator", "fs_io_C")
LEFT_OUT = ("vllm/vllm-rs", "vllm/third_party/deep_gemm/", "vllm/third_party/fmha_sm100/")
SETUP = """#!/bin/sh
# Installs what lies here beside what the machine has; prints what to run. Nothing outside this directory changes.
set -e
cd "$(dirname "$0")"
python3 -m pip install --no-index --no-deps --quiet --upgrade --target packages wheels/*.whl
echo "what pip misses, of which the ladder does not need all:"
PYTHONPATH=$PWD/vllm:$PWD/packages python3 -m pip check || true
echo
echo "cd $PWD/project"
echo "export PYTHONPATH=$PWD/vllm:$PWD/packages VLLM_USE_FLASHINFER_SAMPLER=0"
echo "python3 tools/gpu_smoke.py"
"""


def pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", *arguments], check=True)


def download(requirements: list[str], directory: Path) -> None:
    """Wheels for CPython 3.12 on x86-64 Linux, of exactly these requirements."""
    platforms = [f"--platform={name}_x86_64" for name in PLATFORMS]
    chosen = ["--no-deps", "--only-binary=:all:", "--python-version=3.12", "--implementation=cp", *platforms]
    pip("download", "--quiet", *chosen, "--dest", str(directory), *requirements)


def vllm_wheel(directory: Path) -> Path:
    """vLLM's wheel for CUDA: the largest package by far, so it is looked for before it is asked for."""
    directory.mkdir(parents=True, exist_ok=True)
    if not list(directory.glob(f"vllm-{VLLM}-*.whl")):
        download([f"vllm=={VLLM}"], directory)
    (found,) = directory.glob(f"vllm-{VLLM}-*.whl")
    return found


def is_needed(name: str) -> bool:
    """Whether a file of vLLM's wheel goes along."""
    if name.startswith(LEFT_OUT):
        return False
    compiled = {f"vllm/{part}.abi3.so" for part in (*WITH_DEVICE_CODE, *WITHOUT_DEVICE_CODE)}
    return not name.endswith(".so") or name in compiled


def unpack_vllm(wheel: Path, directory: Path, architecture: int) -> None:
    """vLLM with the patch series, its device code cut down to one architecture."""
    shutil.rmtree(directory, ignore_errors=True)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(directory, [name for name in archive.namelist() if is_needed(name)])
    for part, with_ptx in WITH_DEVICE_CODE.items():
        path = directory / "vllm" / f"{part}.abi3.so"
        library = bytearray(path.read_bytes())
        kept = keep_architecture(library, architecture, with_ptx=with_ptx)
        path.write_bytes(library)
        print(f"{part}: kept {sum(kept.values()) / 2**20:.1f} MiB of device code", flush=True)
    patches = REPOSITORY / "tools" / "apply_patches.py"
    subprocess.run([sys.executable, str(patches), "--target", str(directory)], check=True)


def collect_wheels(directory: Path) -> None:
    """What the machine lacks, and this project, whose wheel brings vLLM's plug-in."""
    directory.mkdir(parents=True, exist_ok=True)
    lines = (REPOSITORY / "tools" / "gpu_wheels.txt").read_text().splitlines()
    download([line for line in lines if line and not line.startswith("#")], directory)
    for own in directory.glob("vllm_overlay-*.whl"):
        own.unlink()
    pip("wheel", "--quiet", "--no-deps", "--wheel-dir", str(directory), str(REPOSITORY))


def project_files() -> Iterator[Path]:
    """What git knows of this project: tools, tests and benchmarks are not in its wheel."""
    command = ["git", "-C", str(REPOSITORY), "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    yield from (Path(name) for name in listed.split("\0") if name and (REPOSITORY / name).is_file())


def pack(directory: Path, out: Path) -> None:
    setup = directory / "setup.sh"
    setup.write_text(SETUP)
    setup.chmod(0o755)
    with tarfile.open(out, "w:xz", preset=6) as archive:
        for part in ("setup.sh", "wheels", "vllm"):
            archive.add(directory / part, f"{NAME}/{part}")
        for path in project_files():
            archive.add(REPOSITORY / path, f"{NAME}/project/{path}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=REPOSITORY / ".gpu-bundle", help="default: .gpu-bundle")
    parser.add_argument("--architecture", type=int, default=90, help="of the GPU; default: 90, Hopper")
    arguments = parser.parse_args()
    directory, out = arguments.directory, arguments.directory / f"{NAME}.tar.xz"
    wheel = vllm_wheel(directory / "download")
    unpack_vllm(wheel, directory / "vllm", arguments.architecture)
    collect_wheels(directory / "wheels")
    pack(directory, out)
    num_bytes = out.stat().st_size
    print(f"{out}: {num_bytes / 2**20:.1f} MiB")
    if num_bytes > MAX_BYTES:
        print(f"more than {MAX_BYTES >> 20} MiB", file=sys.stderr)
        return 1
    print(f"there: tar xf {NAME}.tar.xz && sh {NAME}/setup.sh, then what that prints")
    return 0


if __name__ == "__main__":
    sys.exit(main())
