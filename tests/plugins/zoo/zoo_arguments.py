import isotrain


@isotrain.hookimpl
def isotrain_epoch_ended(epoch, mistakes):
    raise AssertionError("never called")
