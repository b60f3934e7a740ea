"""vllm_lite and its peers on this machine: installs, runs the workloads, writes table and plot.

bench/peers/run.sh [--smoke] [--engines NAME,...] [--workloads NAME,...] [--rounds N] [...]
"""

import argparse
import datetime
import json
import platform
from pathlib import Path
from typing import Any

import psutil
import torch

from peers.engines import Engine, all_engines
from peers.install import PEERS, install
from peers.report import write_report
from peers.running import start
from vllm_lite.bench.bounds import measure_machine
from vllm_lite.cores import num_available_cores
from workloads import Workload, all_workloads

ROOT = Path(__file__).parents[2]
Record = dict[str, Any]


def sessions(engine: Engine, workloads: list[Workload]) -> list[list[Workload]]:
    """Workloads that one process of the engine can run: of one model, and offline or over HTTP."""
    groups: dict[tuple[str, bool], list[Workload]] = {}
    for workload in workloads:
        if engine.lacks(workload) is None:
            over_http = workload.rate is not None or not engine.driver
            groups.setdefault((workload.model, over_http), []).append(workload)
    return list(groups.values())


def run_session(engine: Engine, workloads: list[Workload], number: int, root: Path) -> list[Record]:
    """One record per workload; those after a failure carry its reason, too."""
    threads = num_available_cores()
    machine = measure_machine(torch.bfloat16)
    serving = any(workload.rate is not None for workload in workloads)
    records: list[Record] = [
        {
            "engine": engine.name,
            "workload": workload.name,
            "round": number,
            "read_bandwidth_gb_s": machine.read_bandwidth / 1e9,
            "gemm_gflop_s": machine.flops / 1e9,
        }
        for workload in workloads
    ]
    log = root / "log" / f"{engine.name.replace(' ', '-')}-{'http' if serving else 'offline'}.txt"
    try:
        model = engine.find(workloads[0].model, root / "models")
        with start(engine, model, threads, log, serving) as running:
            for workload, record in zip(workloads, records, strict=True):
                record |= running.measure(workload)
                record["ready_s"] = running.ready_seconds
                record["over_http"] = serving or not engine.driver
                record["weight_bytes"] = weight_bytes(model)
                print(
                    f"round {number}: {engine.name}, {workload.name}: "
                    f"{record['output_tokens_per_s']:.1f} tokens/s, "
                    f"foreign CPU {record['foreign_cpu_share']:.0%}",
                    flush=True,
                )
    except Exception as error:  # of whatever kind: it goes into the table
        for record in records:
            if "seconds" not in record:
                record["error"] = f"{type(error).__name__}: {error}"
        print(f"round {number}: {engine.name}: {error}", flush=True)
    return records


def weight_bytes(model: Path) -> int:
    """Of the file that holds the weights."""
    if model.is_file():
        return model.stat().st_size
    return max(file.stat().st_size for file in model.iterdir())


def in_turn(engines: list[Engine], number: int) -> list[Engine]:
    """Another engine begins each round, so that none always has the machine's better hour."""
    cut = (number - 1) % max(1, len(engines))
    return engines[cut:] + engines[:cut]


def describe_machine() -> Record:
    names = [
        line.split(":", 1)[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return {
        "cpu": names[0] if names else platform.machine(),
        "cores": num_available_cores(),
        "memory_gb": round(psutil.virtual_memory().total / 1e9),
    }


def chosen(text: str | None, names: list[str], what: str) -> list[str]:
    if text is None:
        return names
    wanted = text.split(",")
    unknown = set(wanted) - set(names)
    if unknown:
        raise SystemExit(f"unknown {what} {', '.join(sorted(unknown))}; known: {', '.join(names)}")
    return wanted


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--smoke", action="store_true", help="tiny sizes; the figures say nothing")
    parser.add_argument("--engines", metavar="NAME,...", help="default: all")
    parser.add_argument("--workloads", metavar="NAME,...", help="default: all")
    parser.add_argument("--rounds", type=int, help="default: 3, for --smoke 1")
    parser.add_argument(
        "--append", type=Path, metavar="FILE.json", help="more rounds for these results"
    )
    parser.add_argument("--jobs", type=int, help="compilers at once; default: the cores")
    parser.add_argument("--root", type=Path, default=ROOT / "build/peers", help="environments")
    parser.add_argument("--output", type=Path, help="folder; default: bench/results")
    args = parser.parse_args()
    root = args.root.absolute()
    output = args.output or (root / "smoke" if args.smoke else ROOT / "bench/results")

    every_engine, every_workload = (
        all_engines(root, num_available_cores()),
        all_workloads(args.smoke),
    )
    names = chosen(args.engines, [engine.name for engine in every_engine], "engines")
    engines = [engine for engine in every_engine if engine.name in names]
    names = chosen(args.workloads, [workload.name for workload in every_workload], "workloads")
    workloads = [workload for workload in every_workload if workload.name in names]

    path = args.append or output / f"cpu-{datetime.date.today().isoformat()}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    records: list[Record] = json.loads(path.read_text())["records"] if args.append else []
    first_round = 1 + max((record.get("round", 0) for record in records), default=0)

    def save() -> None:
        if not records:
            return
        named = {record["engine"] for record in records}, {record["workload"] for record in records}
        result = {
            "date": path.stem.removeprefix("cpu-"),
            "smoke": args.smoke,
            "machine": describe_machine(),
            "engines": [engine.name for engine in every_engine if engine.name in named[0]],
            "workloads": {w.name: w.title for w in every_workload if w.name in named[1]},
            "records": records,
        }
        path.write_text(json.dumps(result, indent=1))
        write_report(result, path)

    reasons = {}
    for peer in PEERS:
        if any(engine.peer == peer for engine in engines):
            print(f"installing {peer}", flush=True)
            reasons[peer] = install(peer, root, args.jobs or num_available_cores())
    there = [engine for engine in engines if not reasons.get(engine.peer or "")]
    for engine in engines:
        for workload in workloads:
            why = reasons.get(engine.peer or "") or engine.lacks(workload)
            if why:
                records.append({"engine": engine.name, "workload": workload.name, "error": why})
    save()
    for number in range(args.rounds or (1 if args.smoke else 3)):
        for engine in in_turn(there, first_round + number):
            for session in sessions(engine, workloads):
                records += run_session(engine, session, first_round + number, root)
                save()  # what was measured is not lost if the next does not come back
    print(f"written: {path}, .md and .png")


if __name__ == "__main__":
    main()
