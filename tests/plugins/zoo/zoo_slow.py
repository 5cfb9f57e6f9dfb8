"""Takes its time to be imported."""

import time

import isotrain

time.sleep(1.05)


@isotrain.hookimpl
def isotrain_run_failed(message):
    print(message)
