"""Stands in for a recipe where a test is about Slurm alone: ``probe.py [boot=SECONDS] [exit=CODE] [rank=RANK] ...``.

Prints what it was given. On its first start it waits for a signal, "saves" and exits with 75, or, with ``exit``, the
given rank ends with that code and the others with 0; started again it ends well. ``boot``: seconds without handlers.
"""

import json
import os
import signal
import sys
import time

RENDEZVOUS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "WANDB_MODE")

options = dict(argument.split("=", 1) for argument in sys.argv[1:])
received: list[int] = []
print(json.dumps({name: os.environ[name] for name in RENDEZVOUS} | {"arguments": sys.argv[1:]}), flush=True)
time.sleep(float(options.get("boot", 0)))
for number in (signal.SIGUSR1, signal.SIGTERM):
    signal.signal(number, lambda got, frame: received.append(got))
print("ready", flush=True)
if "SLURM_RESTART_COUNT" in os.environ:
    print("resumed", flush=True)
elif "exit" in options:
    sys.exit(int(options["exit"]) if os.environ["RANK"] == options["rank"] else 0)
else:
    while not received:
        time.sleep(0.05)
    time.sleep(0.2 * int(os.environ["RANK"]))  # ranks do not leave at once
    print("saved", flush=True)
    sys.exit(75)
