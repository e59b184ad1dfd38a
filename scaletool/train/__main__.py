"""The one entrypoint: python, torchrun or accelerate launch -m scaletool.train [RUN.yaml] [--mode M] [--set k=v]..."""

from __future__ import annotations

import argparse
import faulthandler
import os
import sys

from scaletool.config import load_config
from scaletool.doctor.run_config import refuse_errors
from scaletool.errors import ScaletoolError
from scaletool.record import STACKS_SIGNAL


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scaletool.train", description="Train T5 on the engine of the launcher.", allow_abbrev=False
    )
    parser.add_argument("config", nargs="?", metavar="RUN.yaml", help="run config; without it the embedded default")
    parser.add_argument("--mode", choices=["custom", "trainer"], help="custom loop or transformers' Trainer")
    parser.add_argument("--set", action="append", default=[], metavar="section.key=value", help="override a config key")
    arguments = parser.parse_args()
    faulthandler.register(STACKS_SIGNAL)
    mode = [f"train.mode={arguments.mode}"] if arguments.mode else []
    try:
        loaded = load_config(arguments.config, [*arguments.set, *mode])
        refuse_errors(loaded)
        from scaletool.train.run import execute  # torch and transformers are loaded only for a config that can run

        return execute(loaded.run)
    except ScaletoolError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_status


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Engines leave threads behind that abort the interpreter's own shutdown in some runs, after all work is done.
    os._exit(status)
