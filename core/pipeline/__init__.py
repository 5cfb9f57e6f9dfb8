"""Pipeline parallelism: schedules of forward and backward passes, and where to split a model.

Imports no framework.
"""
