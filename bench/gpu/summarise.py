"""Puts the JSON lines of gpu_check.sh into one JSON file and a Markdown table.

python bench/gpu/summarise.py LINES OUTPUT_WITHOUT_SUFFIX
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch


def commit() -> str:
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        return "unknown"
    return done.stdout.strip() or "unknown"


def table(title: str, lines: list[dict[str, Any]]) -> str:
    columns = list(dict.fromkeys(name for line in lines for name in line if name != "stage"))
    rows = [[str(line.get(name, "")).replace("|", "/") for name in columns] for line in lines]
    text = [f"\n## {title}\n", "| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    return "\n".join([*text, *("| " + " | ".join(row) + " |" for row in rows)]) + "\n"


def main() -> int:
    source, target = Path(sys.argv[1]), sys.argv[2]
    lines = [json.loads(line) for line in source.read_text().splitlines()]
    about = {
        "commit": commit(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "no device",
    }
    Path(f"{target}.json").write_text(json.dumps({"about": about, "lines": lines}, indent=1) + "\n")
    stages: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        stages.setdefault(line["stage"], []).append(line)
    text = f"# {about['device']}, commit {about['commit']}, torch {about['torch']}\n"
    text += "".join(table(title, part) for title, part in stages.items())
    Path(f"{target}.md").write_text(text)
    runs = stages.get("run", [])
    failed = [line["name"] for line in runs if isinstance(line["status"], int) and line["status"]]
    skipped = [line["name"] for line in runs if isinstance(line["status"], str)]
    print(f"{target}.json, .md, .log", end="")
    print("; failed: " + ", ".join(failed) if failed else "", end="")
    print("; not run: " + ", ".join(skipped) if skipped else "")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
