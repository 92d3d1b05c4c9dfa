"""An nvidia-smi that says what ``smi.json`` beside it says; each call is a line in ``calls``.

{"cards": [{"uuid": "GPU-a", ...}],       answers to --query-gpu, by field; "[N/A]" for those not given
 "unknown": ["memory.reserved"],          fields that this release does not know
 "apps": [["GPU-a", "4711", "python", "300"]], "list": "what -L prints",
 "stderr": "what it complains of", "say": "what it says instead of all that", "code": 0,
 "hang": true, "endless": true}
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path


def main() -> int:
    here = Path(sys.argv[0]).parent
    told = json.loads((here / "smi.json").read_text(encoding="utf-8"))
    with (here / "calls").open("a", encoding="utf-8") as calls:
        calls.write(" ".join((str(os.getpid()), *sys.argv[1:])) + "\n")
    if told.get("hang"):
        time.sleep(600)
    while told.get("endless"):
        print("0, GPU-a, " * 1000)
    print(told.get("stderr", ""), file=sys.stderr, end="", flush=True)
    if "say" in told:
        print(told["say"])
        return int(told.get("code", 1))
    asked = sys.argv[1]
    if asked == "-L":
        print(told.get("list", ""))
    elif asked.startswith("--query-compute-apps="):
        for app in told.get("apps", ()):
            print(", ".join(app))
    else:
        fields = asked.removeprefix("--query-gpu=").split(",")
        for field in fields:
            if field in told.get("unknown", ()):
                print(f'Field "{field}" is not a valid field to query.\n')
                return 2
        for card in told["cards"]:
            print(", ".join(str(card.get(field, "[N/A]")) for field in fields))
    return int(told.get("code", 0))


if __name__ == "__main__":
    sys.exit(main())
