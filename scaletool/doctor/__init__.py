"""Checks of what a user gives, before anything is started."""

from scaletool.doctor.rules import Finding, check_run, refuse_errors

__all__ = ["Finding", "check_run", "refuse_errors"]
