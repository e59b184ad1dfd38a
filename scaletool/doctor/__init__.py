"""Checks of what a user gives, before anything is started."""
