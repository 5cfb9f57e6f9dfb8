import isotrain


@isotrain.hookimpl
def isotrain_register_strategies(register):
    register.add("zoo_lazy:Lazy", name="data-parallel")
