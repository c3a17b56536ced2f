"""The GPU at hand and the memory bandwidth that its datasheet promises."""

import re
import subprocess
from typing import Any

# First match wins. TB/s (1e12 bytes per second) of NVIDIA's datasheets, by the name that
# nvidia-smi prints.
DATASHEET_TB_S: tuple[tuple[str, float], ...] = (
    (r"B300", 8.0),
    (r"B200", 8.0),
    (r"GH200 144G", 4.9),
    (r"GH200", 4.0),
    (r"H200", 4.8),
    (r"H100 NVL", 3.9),
    (r"H100 PCIe", 2.0),
    (r"H100", 3.35),
    (r"H800 PCIe", 2.0),
    (r"H800", 3.35),
    (r"H20\b", 4.0),
    (r"A100.*PCIE?.*80GB|A100 80GB PCIe", 1.935),
    (r"A100.*80GB", 2.039),
    (r"A100", 1.555),
    (r"A800.*PCIe", 1.935),
    (r"A800", 2.039),
    (r"A30\b", 0.933),
    (r"A40\b", 0.696),
    (r"A10G?\b", 0.600),
    (r"L40S?\b", 0.864),
    (r"L4\b", 0.300),
    (r"RTX PRO 6000 Blackwell.*Server", 1.597),
    (r"RTX PRO 6000 Blackwell", 1.792),
    (r"RTX 6000 Ada", 0.960),
    (r"RTX A6000", 0.768),
    (r"RTX 5090", 1.792),
    (r"RTX 5080", 0.960),
    (r"RTX 4090", 1.008),
    (r"RTX 4080 SUPER", 0.736),
    (r"RTX 4080", 0.717),
    (r"RTX 3090 Ti", 1.008),
    (r"RTX 3090", 0.936),
    (r"V100", 0.900),
    (r"T4\b", 0.320),
)


def datasheet_tb_s(name: str | None) -> float | None:
    """Datasheet bandwidth in TB/s of a GPU by its name, ``None`` for one that is not listed."""
    if name is None:
        return None
    for pattern, tb_s in DATASHEET_TB_S:
        if re.search(pattern, name, re.IGNORECASE):
            return tb_s
    return None


def floor_us(minimum_bytes: int, tb_s: float | None) -> float | None:
    """Time in µs that ``minimum_bytes`` take at ``tb_s``."""
    return None if tb_s is None else minimum_bytes / tb_s / 1e6


def detect_gpu() -> dict[str, Any] | None:
    """Name, driver and memory of the first GPU as nvidia-smi tells it; ``None`` without one."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True)
        name, driver, memory = (x.strip() for x in answer.stdout.splitlines()[0].split(","))
    except (OSError, subprocess.SubprocessError, IndexError, ValueError):
        return None
    return {"gpu": name, "driver": driver, "gpu_memory": memory}
