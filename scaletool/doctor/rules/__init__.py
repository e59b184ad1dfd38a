"""The rules over what a user brings, by the kind of file. Importing this package registers all of them."""

from scaletool.doctor.rules import (
    accelerate,
    arguments,
    deepspeed,
    environment,
    model,
    sbatch,
    script,
    script_data,
    script_padding,
    script_precision,
    script_ranks,
    script_schedules,
    trainer_metrics,
    trainer_script,
)

__all__ = [
    "accelerate",
    "arguments",
    "deepspeed",
    "environment",
    "model",
    "sbatch",
    "script",
    "script_data",
    "script_padding",
    "script_precision",
    "script_ranks",
    "script_schedules",
    "trainer_metrics",
    "trainer_script",
]
