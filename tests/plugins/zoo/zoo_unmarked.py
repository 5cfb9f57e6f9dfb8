def isotrain_register_strategies(register):
    raise AssertionError("never called")
