"""Compiles every kernel for Hopper and Blackwell on a machine without a GPU: ``make gpu-compile``.

Prints registers and spills of each kernel and exits with 1 if one fails to compile or spills. Needs
JAX's CUDA plugin (about 600 MB); it is downloaded into build/, not installed, so that JAX goes on
running on the CPU otherwise.
"""

import argparse
import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# What the compiler has to know of a GPU that is not there, and the name it then compiles for.
GPUS = {
    "H100": {"target": "sm_90a", "major": 9, "core_count": 132, "l2_cache_size": 52428800},
    "B200": {"target": "sm_100a", "major": 10, "core_count": 148, "l2_cache_size": 132644864},
}
TRITON_ARCHES = (90, 100)


def _plugin_path() -> Path | None:
    """Where the CUDA plugin of the installed JAX lies; downloads it. ``None``: it is installed."""
    if any(importlib.util.find_spec(f"jax_cuda{major}_plugin") for major in (12, 13)):
        return None
    version = importlib.metadata.version("jax")
    path = ROOT / "build" / f"gpu-compile-jax{version}-py{sys.version_info.minor}"
    done = path / "complete"
    if not done.exists():
        print(f"Downloading the CUDA plugin of JAX {version} to {path.relative_to(ROOT)}")
        packages = [f"jax-cuda12-plugin=={version}", f"jax-cuda12-pjrt=={version}"]
        packages.append("nvidia-cuda-nvcc-cu12==12.9.*")  # ptxas and libdevice
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        target = ["--no-deps", "--upgrade", "--target", str(path)]
        subprocess.run([*pip, *target, *packages], check=True)
        done.touch()
    return path


def _target_config(major: int, core_count: int, l2_cache_size: int, **_: object) -> str:
    """A GPU as XLA's text protocol buffer describes it."""
    return f"""
        gpu_device_info {{
          threads_per_block_limit: 1024
          threads_per_warp: 32
          shared_memory_per_block: 49152
          shared_memory_per_block_optin: 232448
          shared_memory_per_core: 233472
          threads_per_core_limit: 2048
          core_count: {core_count}
          fpus_per_core: 128
          block_dim_limit_x: 2147483647
          block_dim_limit_y: 65535
          block_dim_limit_z: 65535
          memory_bandwidth: 3350000000000
          l2_cache_size: {l2_cache_size}
          clock_rate_ghz: 1.98
          device_memory_size: 85017493504
          registers_per_core_limit: 65536
          registers_per_block_limit: 65536
          cuda_compute_capability {{ major: {major} feature_extension: ACCELERATED_FEATURES }}
        }}
        platform_name: "CUDA"
        dnn_version_info {{ major: 9 minor: 10 }}
        device_description_str: "GPU"
    """


def _resources(ptxas_log: str) -> tuple[str, int, int]:
    """Target, registers and spilled bytes that ptxas reports of one kernel."""
    target = re.search(r"for '(sm_\w+)'", ptxas_log)
    registers = re.search(r"Used (\d+) registers", ptxas_log)
    spills = re.findall(r"(\d+) bytes (?:stack frame|spill stores|spill loads)", ptxas_log)
    assert target and registers and spills, f"not understood: {ptxas_log}"
    return target[1], int(registers[1]), sum(map(int, spills))


def compile_pallas(gpu: str, dump: Path) -> int:
    """Compiles the Pallas cases for one GPU in this process; returns the number of problems.

    One GPU a process: JAX 0.11.2 compiles for the first one again if a second is asked for.
    """
    import jax
    from jax.experimental import topologies

    from parity_tests.pallas_cases import CASES
    from tvd_jax import compat

    topology = topologies.get_topology_desc(
        platform="cuda", target_config=_target_config(**GPUS[gpu]), topology="1x1x1"
    )
    mesh = topologies.make_mesh(topology, (1,), ("x",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    problems, reported = 0, set()
    for case in CASES:
        try:
            with compat.assume_cuda():
                jax.jit(case.function()).lower(*case.arguments(sharding=sharding)).compile()
        except Exception as error:
            problems += 1
            print(f"{gpu} {case}: PROBLEM {type(error).__name__}: {error}", flush=True)
        for log in sorted(set(dump.glob("*.ptxas")) - reported):
            reported.add(log)
            target, registers, spilled = _resources(log.read_text())
            widths = _widths(log.with_suffix(".ptx").read_text())
            wrong = spilled > 0 or target != GPUS[gpu]["target"]
            problems += wrong
            print(
                f"{gpu} {target:7} {log.stem.rpartition('_')[0]:12} {registers:4} regs "
                f"{spilled:4} B spilled  {widths:28} {case}{'  PROBLEM' if wrong else ''}",
                flush=True,
            )
    if not reported:
        print(f"{gpu}: PROBLEM nothing was compiled")
    return problems + (not reported)


def _widths(ptx: str) -> str:
    """How the kernel moves data: bulk copies (TMA), and bytes a thread at once otherwise."""
    bulk = len(re.findall(r"cp\.async\.bulk\.(?!commit|wait)", ptx))
    pattern = r"\b(ld|st)\.global\S*?(?:\.v(\d))?\.[bfsu](\d+)\s"
    sizes = {f"{k}{int(v or 1) * int(b) // 8}" for k, v, b in re.findall(pattern, ptx)}
    return " ".join([f"bulk x{bulk}" if bulk else "", *sorted(sizes)]).strip()


def _run_child(arguments: list[str], **env: str) -> int:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | env
    command = [sys.executable, "-W", "ignore", *arguments]
    child = subprocess.run(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
    if child.returncode:
        # The plugin reports that there is no driver and no nvdisasm, of which neither is needed.
        noise = re.compile("nvdisasm|cudart_stub|absl::InitializeLog")
        lines = child.stderr.splitlines(keepends=True)
        sys.stderr.writelines(line for line in lines if not noise.search(line))
    return child.returncode


def main() -> int:
    """Compiles everything, one architecture a child process; 1 if there is a problem."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pallas-child", choices=GPUS, help=argparse.SUPPRESS)
    gpu = parser.parse_args().pallas_child
    if gpu:
        return min(compile_pallas(gpu, Path(os.environ["MOSAIC_GPU_DUMP_TO"])), 1)

    plugin = _plugin_path()
    failed = []
    for gpu in GPUS:
        with tempfile.TemporaryDirectory() as dump:
            env = {
                "JAX_PLATFORMS": "cpu",
                "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
                "MOSAIC_GPU_DUMP_TO": dump,
                "MOSAIC_GPU_DUMP_PTX": "1",
                "MOSAIC_GPU_DUMP_PTXAS": "1",
            }
            if plugin:
                env["PYTHONPATH"] = str(plugin)
                env["XLA_FLAGS"] = f"--xla_gpu_cuda_data_dir={plugin}/nvidia/cuda_nvcc"
            if _run_child(["-m", "parity_tests.gpu_compile", "--pallas-child", gpu], **env):
                failed.append(f"Pallas for {gpu}")
    with tempfile.TemporaryDirectory() as cache:
        for arch in TRITON_ARCHES:
            command = ["-m", "parity_tests.aot_triton", "--arch", str(arch)]
            if _run_child(command, TRITON_CACHE_DIR=cache):
                failed.append(f"Triton for sm_{arch}")
    print("Failed: " + ", ".join(failed) if failed else "Every kernel compiles, none spills.")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
