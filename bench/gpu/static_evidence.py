"""What nvcc says of the kernels that are bound by memory, as a Markdown table; no GPU is needed.

    python bench/gpu/static_evidence.py

Needs nvcc and nvdisasm (of the CUDA toolkit, or of the package nvidia-cuda-nvdisasm); compiles for
sm_90a. Columns: see ``row``. docs/performance.md says what follows.
"""

import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))
from cuda_budget import parse, readable  # noqa: E402

ARCHITECTURE = "sm_90a"
# Of an H100 or H200's multiprocessor.
REGISTERS, WARPS, BLOCKS, SHARED_BYTES = 65536, 64, 32, 227 * 1024
SHARED_BYTES_OF_A_BLOCK = 1024  # that the system takes


@dataclass(frozen=True)
class Kernel:
    source: str
    name: str
    threads: int  # of a block, at the shapes of bench/gpu/small_kernels.py
    loads: int  # of 16 bytes, from memory, that a thread has on their way together


BF16 = "BFloat16, BFloat16"
UNIT = "device::Chunk<unsigned int, 4> "
KERNELS = (
    Kernel("ops/rms_norm", "rms_norm_kernel<BFloat16, true, 0, 2>", 256, 4),
    Kernel("ops/rms_norm", "rms_norm_kernel<BFloat16, true, 8, 2>", 128, 2),
    Kernel("ops/rope", f"rope_kernel<{BF16}, true, false>", 320, 2),
    Kernel("ops/rope", f"rope_kernel<{BF16}, true, true>", 448, 2),
    Kernel("ops/silu_mul", "silu_mul_kernel<BFloat16, true>", 128, 4),
    Kernel("ops/embedding", f"embedding_kernel<{BF16}>", 128, 4),
    Kernel("cache/store_kv", f"store_kv_kernel<{BF16}, true>", 128, 2),
    Kernel("cache/copy_blocks", f"copy_blocks_kernel<{UNIT}>", 256, 4),
    Kernel("ops/moe", "route_experts_kernel<BFloat16, 4>", 128, 0),
    Kernel("ops/moe", "permute_tokens_kernel", 512, 0),
    Kernel("ops/moe", f"gather_rows_kernel<{UNIT}>", 256, 1),
    Kernel("ops/moe", "combine_experts_kernel<BFloat16, true>", 256, 4),
    Kernel("ops/sample", "sampling::sample_prepare_kernel", 256, 8),
    Kernel("ops/sample", "sampling::sample_weigh_kernel", 256, 8),
    Kernel("ops/sample", "sampling::sample_collect_kernel", 256, 8),
    Kernel("ops/sample", "sampling::sample_choose_kernel", 512, 0),
    Kernel("ops/sample", "sampling::sample_rank_kernel", 256, 8),
)


@dataclass(frozen=True)
class Compiled:
    usage: dict[str, int]
    code: list[str]  # instructions, and labels with a colon


def compile_source(source: Path) -> dict[str, Compiled]:
    """The kernels of a *.cu by readable name."""
    with tempfile.TemporaryDirectory() as directory:
        cubin = Path(directory) / "kernels.cubin"
        done = subprocess.run(
            ["nvcc", "-std=c++20", "-O3", "--fmad=false", f"-arch={ARCHITECTURE}", "-Xptxas=-v",
             "-I", ROOT / "csrc", "-cubin", source, "-o", cubin],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        listing = subprocess.run(
            ["nvdisasm", "-c", cubin], capture_output=True, text=True, check=True
        ).stdout
    return kernels(done.stderr, listing)


def kernels(said: str, listing: str) -> dict[str, Compiled]:
    """Of what ptxas said and nvdisasm lists."""
    code: dict[str, list[str]] = {}
    for part in re.split(r"^\.text\.", listing, flags=re.M)[1:]:
        name, body = part.split(":", 1)
        lines = [re.sub(r"/\*.*?\*/", "", line).strip() for line in body.splitlines()]
        code[name] = [
            line.rstrip(" ;")
            for line in lines
            if re.fullmatch(r"\.L_x_\d+:|\$\S+:|(@!?\w+ )?\s*[A-Z].*;", line) and "NOP" not in line
        ]
    usage = parse(said)[ARCHITECTURE]
    names = readable(list(code))
    return {
        short: Compiled(usage[name], code[name]) for short, name in zip(names, code, strict=True)
    }


def main_path(code: list[str]) -> list[str]:
    """Without the slow paths of divisions and roots, which follow the last exit as functions."""
    functions = [i for i, line in enumerate(code) if line.startswith("$")]
    return code[: functions[0]] if functions else code


def inner_loops(code: list[str]) -> list[list[str]]:
    """Stretches that end in a branch back to their begin and hold no other such stretch."""
    labels = {line[:-1]: i for i, line in enumerate(code) if line.endswith(":")}
    loops = []
    for end, line in enumerate(code):
        target = re.search(r"\bBRA\b.*`\((\S+)\)", line)
        if target and labels.get(target[1], end) < end:
            loops.append((labels[target[1]], end))
    return [
        code[begin : end + 1]
        for begin, end in loops
        if not any(begin <= b and e < end for b, e in loops)
    ]


def moves(code: list[str]) -> int:
    """Loads and stores of 16 bytes."""
    return sum(bool(re.search(r"\b(LDG|STG)\.\S*128\b", line)) for line in code)


def count(code: list[str]) -> int:
    return sum(not line.endswith(":") for line in code)


def blocks_per_multiprocessor(usage: dict[str, int], threads: int) -> int:
    warps = threads // 32
    by_registers = REGISTERS // (-(-usage["registers"] // 8) * 8 * 32) // warps
    by_shared = SHARED_BYTES // (usage["shared_bytes"] + SHARED_BYTES_OF_A_BLOCK)
    return min(by_registers, by_shared, WARPS // warps, BLOCKS)


def row(kernel: Kernel, compiled: Compiled) -> str:
    """| name | registers, shared bytes | threads, blocks per multiprocessor | KiB on their way |
    instructions, 16-byte moves and others to memory | instructions per move, where it moves most |
    """
    code = main_path(compiled.code)
    blocks = blocks_per_multiprocessor(compiled.usage, kernel.threads)
    hot = max([*inner_loops(code), []], key=moves)
    if moves(hot) == 0:
        hot = code
    others = sum(bool(re.search(r"\b(LDG|STG|ATOMG|RED)\b", line)) for line in code) - moves(code)
    per_move = f"{count(hot) / moves(hot):.0f} ({count(hot)} / {moves(hot)})" if moves(hot) else "-"
    under_way = blocks * kernel.threads * kernel.loads * 16 // 1024
    name = kernel.name.removeprefix("sampling::")
    cells = (
        f"`{name}`",
        f"{compiled.usage['registers']}, {compiled.usage['shared_bytes']}",
        f"{kernel.threads}, {blocks}",
        str(under_way or "-"),
        f"{count(code)}, {moves(code)}, {others}",
        per_move,
    )
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    sources = {
        source: compile_source(ROOT / "csrc" / f"{source}.cu")
        for source in dict.fromkeys(kernel.source for kernel in KERNELS)
    }
    titles = (
        "kernel", "registers, shared bytes", "threads, blocks", "KiB under way",
        "instructions, 16-byte moves, others", "instructions per move",
    )  # fmt: skip
    print("| " + " | ".join(titles) + " |\n" + "|---" * len(titles) + "|")
    for kernel in KERNELS:
        print(row(kernel, sources[kernel.source][kernel.name]))


if __name__ == "__main__":
    main()
