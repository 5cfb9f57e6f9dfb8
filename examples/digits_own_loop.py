"""Your own training loop, the same under every backend: the session.

    python examples/digits_own_loop.py --backend horovod-tf --replicas 2

`isotrain.launch` starts the processes and calls `train(session)` in each of them. The loop here
stops early: it keeps the weights of the best epoch and gives up when two epochs brought nothing.
See docs/own-loop.md for what else a session offers.
"""

from __future__ import annotations

import argparse

from digits import spec

import isotrain

PATIENCE = 2  # epochs without improvement


def train(session: isotrain.Session) -> dict[str, float]:
    """Trains until the validation accuracy stops rising. Runs on every process alike."""
    best, best_epoch, weights = 0.0, 0, {}
    for batch in session.batches():
        session.step(batch)
        if not batch.is_last_of_epoch:
            continue
        measured = session.evaluate()  # exact, and the same number on every process
        if session.is_main:
            print(f"epoch {batch.epoch + 1}: validation accuracy {measured['accuracy']:.4f}")
        if measured["accuracy"] > best:
            best, best_epoch = measured["accuracy"], batch.epoch
            weights = session.read_state(["trainable", "non-trainable"])  # moving averages too
        elif batch.epoch - best_epoch >= PATIENCE:
            break
    session.write_state(weights)
    return {"best epoch": best_epoch + 1, **session.evaluate()}


def main() -> None:
    """Runs the loop under the backend that the command line names."""
    parser = argparse.ArgumentParser(description="Train digits with a loop of one's own.")
    parser.add_argument("--backend", default="torch-ddp", help="such as tf-mirrored")
    parser.add_argument("--replicas", type=int, default=1)
    args = parser.parse_args()

    returned = isotrain.launch(
        train, spec.replace(epochs=20), backend=args.backend, replicas=args.replicas
    )
    found = returned[0]  # what `train` returned on rank 0
    print(f"best epoch {found['best epoch']}, validation accuracy {found['accuracy']:.4f}")


if __name__ == "__main__":
    main()
