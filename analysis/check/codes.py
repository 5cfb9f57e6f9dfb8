"""Every code that a check can give: what it means, why it matters here, and what to do."""

from __future__ import annotations

from collections.abc import Iterable

from isotrain.analysis.check.rule import Rule, Severity

GROUPS = {
    "ISO1": "the model",
    "ISO2": "batches, data and learning rate",
    "ISO3": "loss, metrics, optimizer and strategy",
    "ISO4": "the machine that the check runs on",
    "ISO5": "what stops a run anywhere, and notes of backends",
}
"""Start of a code to what such codes are about."""

_ERROR, _WARNING, _NOTE = Severity

_ALL = (
    Rule(
        "ISO101",
        _WARNING,
        "a layer normalises over the local batch",
        "In training, each replica normalises with the mean and variance of its local batch, not of the"
        " global batch. So the loss curve depends on the number of replicas, on every backend alike. The"
        " moving statistics, which evaluation uses, are averaged over the replicas in every step.",
        "Set `batch_norm: global` to normalise over the global batch. Or set `batch_norm: ghost`, which"
        " normalises over 8 parts of it, whatever the number of replicas, and sends nothing more. Or use a"
        " layer that normalises each sample on its own, such as layer or group normalisation. Or compare only"
        " runs with the same number of replicas.",
    ),
    Rule(
        "ISO102",
        _WARNING,
        "a layer draws random numbers on each replica",
        "Each replica draws its own numbers for its local batch, because two replicas must not drop the"
        " same units. Which numbers a sample gets depends on the number of replicas, so loss curves agree"
        " only on average.",
        "Set `random_layers: per-sample`: a sample then gets the same numbers on any number of replicas. Or"
        " move augmentation into the spec's `transform`.",
    ),
    Rule(
        "ISO103",
        _WARNING,
        "a layer draws random numbers that differ between frameworks",
        "The layer has the same seed everywhere, but each framework draws other numbers from the same"
        " seed. Backends of one framework draw the same ones.",
        "Set `random_layers: per-sample`: portable models then draw the same numbers under every framework."
        " Or move augmentation into the spec's `transform`.",
    ),
    Rule(
        "ISO104",
        _WARNING,
        "synchronised normalisation is not synchronised on this backend",
        "The layer asks for statistics of the global batch, and the backend cannot give them. The layer"
        " then silently uses its local batch, or stops the run.",
        "Set `batch_norm: global`, which normalises over the global batch on every backend, on CPUs too. Or"
        " use a backend that synchronises the layer, which this finding does not list. Or use a layer that"
        " normalises each sample on its own.",
    ),
    Rule(
        "ISO105",
        _WARNING,
        "part of the model computes in fewer bits than the spec's precision",
        "The layer or its variables have their own dtype. A float64 run rounds there as a run with fewer"
        " bits does, and agrees with others only that far.",
        "Let the layer take the dtype of the spec's `precision`: leave out its dtype. Create the variables"
        " of a native model in float64.",
    ),
    Rule(
        "ISO106",
        _WARNING,
        "the model is given per framework",
        "Each framework trains its own model. isotrain gives them the same samples in the same order. But"
        " initial weights and the arithmetic of the layers are each model's own.",
        "Give one portable (Keras) model to compare frameworks exactly. Or copy the initial weights from"
        " one model to the other with `write_state`.",
    ),
    Rule(
        "ISO107",
        _NOTE,
        "part of the model cannot be inspected",
        "What the model computes outside of known layers is not visible before it runs. It may normalise"
        " over the local batch, or draw random numbers.",
        "Look for these yourself, or give a model of known layers.",
    ),
    Rule(
        "ISO108",
        _NOTE,
        "a layer normalises over micro-batches",
        "With `gradient_accumulation_steps`, each micro-batch is normalised on its own. So the result"
        " depends on `gradient_accumulation_steps`, although gradients are accumulated exactly.",
        "Use a layer that normalises each sample on its own, or set `gradient_accumulation_steps: 1`.",
    ),
    Rule(
        "ISO109",
        _WARNING,
        "the model defines its own training, which is not called",
        "The model's class may define a training step, a loss or metrics, or be compiled with some. These"
        " belong to its framework's own training loop. Here the spec's loss, optimizer and metrics train"
        " and measure the model. Whatever else that code computes, such as a second loss or a penalty,"
        " would be missing.",
        "Write what the step computes as an objective, `objective(model, (inputs, targets))`. It may call"
        " parts of the model. Or remove that code, or silence this code if the spec says the same.",
    ),
    Rule(
        "ISO110",
        _WARNING,
        "a trainable weight gets no gradient",
        "The loss of the first step does not depend on the weight. So it keeps its initial value, except"
        " for weight decay. Backends that communicate gradients while they are computed wait for this one"
        " in vain, unless they are told.",
        "Freeze the weight or take it out of the model. If it takes part only in some steps, say so in"
        " `backend_options`, as `find_unused_parameters` where the backend has it.",
    ),
    Rule(
        "ISO201",
        _WARNING,
        "the global batch grows with the replicas",
        "`local_batch_size` fixes the batch of one replica. Runs with another number of replicas have another"
        " global batch, fewer or more steps in an epoch, and another loss curve.",
        "Set `global_batch_size` instead; it is then divided over the replicas.",
    ),
    Rule(
        "ISO202",
        _WARNING,
        "the learning rate is not scaled to the global batch",
        "The global batch is not the one that the rate was chosen for, and `scaling.rule` `none` leaves"
        " the rate as it is.",
        "Set `scaling` to `{rule: linear, base_batch_size: N}` or `sqrt`. N is the global batch that"
        " `optimizer.lr` was chosen for. Or choose the rate anew.",
    ),
    Rule(
        "ISO203",
        _NOTE,
        "the learning rate is scaled up much, without a warm-up",
        "A rate of many times the base rate often diverges in the first epochs. The linear rule was"
        " proposed together with a warm-up (Goyal et al. 2017).",
        "Give the schedule `warmup_epochs` or `warmup_steps`.",
    ),
    Rule(
        "ISO204",
        _NOTE,
        "the linear rule scales an adaptive optimizer",
        "Steps of Adam and similar optimizers hardly depend on the size of the gradients. For them the"
        " square root of the batch is the better founded rule (Malladi et al. 2022).",
        "Set `scaling.rule` to `sqrt`.",
    ),
    Rule(
        "ISO205",
        _NOTE,
        "the global batch does not divide by the replicas",
        "Local batches differ by one sample. Loss, gradients and metrics stay exact means over the global"
        " batch, because every replica is weighted by its samples. But replicas with fewer samples wait for"
        " the others, and layers that use the local batch see unequal ones.",
        "Choose a global batch that is a multiple of the number of replicas.",
    ),
    Rule(
        "ISO206",
        _WARNING,
        "there are replicas without samples",
        "A step has fewer samples than there are replicas. The replicas left over compute on a placeholder"
        " of weight 0. The result is right, and they contribute nothing to it.",
        "Use fewer replicas or a larger global batch. With fewer samples than replicas, use one replica.",
    ),
    Rule(
        "ISO207",
        _NOTE,
        "accumulation does not divide the local batch",
        "Micro-batches differ by one sample. They are weighted by their samples, so the gradient is exact."
        " The step may compute a little longer, and layers that use the batch see unequal ones.",
        "Choose a global batch that is a multiple of replicas times `gradient_accumulation_steps`.",
    ),
    Rule(
        "ISO208",
        _WARNING,
        "there are micro-batches without samples",
        "A local batch has fewer samples than `gradient_accumulation_steps`. The micro-batches left over are"
        " placeholders of weight 0, computed for nothing.",
        "Lower `gradient_accumulation_steps`, or raise the global batch.",
    ),
    Rule(
        "ISO209",
        _NOTE,
        "the last batch of an epoch leaves replicas without samples",
        "It has fewer samples than there are replicas, and the others compute on a placeholder of weight"
        " 0. Means stay exact. Layers that normalise over the batch see a single sample.",
        "Choose a global batch that leaves a larger last batch or none, or set `drop_remainder`.",
    ),
    Rule(
        "ISO210",
        _WARNING,
        "the data fixes its own order",
        "A data source that shards itself decides which samples are in a batch. It may decide otherwise"
        " for another number of replicas. isotrain does not guarantee the order of samples for it.",
        "Give arrays, memory-mapped files or a source that can be indexed. Or let the stream give every"
        " number of replicas the same global batches.",
    ),
    Rule(
        "ISO211",
        _NOTE,
        "steps is not a whole number of epochs",
        "The run ends in the middle of an epoch. Some samples are seen once more than others, and the last"
        " metrics are means over part of an epoch.",
        "Choose a multiple of the steps of an epoch, or set `epochs`.",
    ),
    Rule(
        "ISO212",
        _WARNING,
        "there are fewer samples than the global batch",
        "Every step takes all samples, and they are fewer than the global batch. The learning rate is"
        " still scaled by the global batch of the spec.",
        "Choose a global batch of at most the number of samples.",
    ),
    Rule(
        "ISO213",
        _ERROR,
        "there is not one full global batch",
        "There are fewer samples than the global batch, so they make one partial batch. `drop_remainder`"
        " leaves that out, and the run has no step.",
        "Choose a smaller global batch, or set `drop_remainder` to false.",
    ),
    Rule(
        "ISO214",
        _NOTE,
        "the samples are not shuffled",
        "Every epoch takes the samples in the order of the data, and each replica gets neighbours. Sorted"
        " data makes one-sided batches, which matters most for layers that normalise over the local batch.",
        "Set `shuffle` to true, choose another `order`, or store the samples in a random order.",
    ),
    Rule(
        "ISO215",
        _WARNING,
        "some samples are never seen",
        "`drop_remainder` leaves out the end of every epoch. Without shuffling, these are always the same"
        " samples. Which ones depends on the global batch.",
        "Set `shuffle` to true or `drop_remainder` to false.",
    ),
    Rule(
        "ISO216",
        _ERROR,
        "a layer cannot be trained on a slice of one sample",
        "A local batch, or a micro-batch of it, is a single sample. With one value per channel the layer"
        " has nothing to normalise by, and its framework refuses that. The run would end at that batch, so"
        " it does not start.",
        "If it is the last batch of an epoch, set `drop_remainder`. Or choose a global batch, a number of"
        " replicas or `gradient_accumulation_steps` that leaves at least two samples. Or use a layer that"
        " normalises each sample on its own.",
    ),
    Rule(
        "ISO217",
        _WARNING,
        "a layer normalises over a single sample",
        "A local batch, or a micro-batch of it, is a single sample. If there are no further positions to"
        " normalise over, as images have them, its variance is 0. The layer then gives the same for any"
        " sample, and its moving variance shrinks.",
        "If it is the last batch of an epoch, set `drop_remainder`. Or choose a global batch, a number of"
        " replicas or `gradient_accumulation_steps` that leaves more samples.",
    ),
    Rule(
        "ISO218",
        _ERROR,
        "the transform mixes samples",
        "The transform is called with one replica's local batch. If it gives a sample something of another"
        " (mixup, CutMix, a mean over the batch), the samples depend on the number of replicas. A run of"
        " several replicas tries it on its first local batch, as a whole and in parts, with the same random"
        " numbers. If the samples differ, the run is refused.",
        "Change each sample on its own, with the numbers that the third argument draws. Its `partner()` gives"
        " each sample another one of the global batch, for mixup and CutMix.",
    ),
    Rule(
        "ISO219",
        _WARNING,
        "part of the spec never takes effect in the run",
        "An average of the weights begins, or an update is due for the first time, after the last step. The"
        " run ends with the weights themselves, or with weights that were never trained.",
        "Begin earlier (`start`, `every`, `from_epoch`), train longer, or leave the field out.",
    ),
    Rule(
        "ISO301",
        _ERROR,
        "the loss is not a mean over samples",
        "isotrain takes what a loss returns as the mean over its slice, and averages that over slices and"
        " replicas. A sum, or a sum divided by the global batch, shrinks with the number of replicas and"
        " micro-batches, as do the gradients. A loss that compares samples of a batch with each other sees"
        " fewer of them. A run of several replicas or micro-batches evaluates its first batch as a whole"
        " and in two parts. If these disagree, the run is refused. Of losses by name, only `circle`,"
        " `dice`, `tversky` and those with a `reduction` are tried. The others are means.",
        "Return one loss per sample, or divide by the number of samples that the function gets. Leave out"
        " `reduction`, and scale the learning rate instead. If the loss gathers the samples of all replicas"
        " itself, or is meant for each replica's own samples, silence this in the spec's `ignore`. The run"
        " then goes on as it is.",
    ),
    Rule(
        "ISO302",
        _NOTE,
        "the spec has a custom metric",
        "isotrain sums each variable of a metric over the replicas, and then computes the result. So a"
        " metric is exact over all replicas if its state adds up. That holds for Keras metrics and for"
        " functions with one value per sample. It does not hold for a state such as a maximum, nor for a"
        " function that returns one number. Each slice then counts as one sample.",
        "Return one value per sample, or keep sums and counts as the metric's state. Then silence this code.",
    ),
    Rule(
        "ISO303",
        _WARNING,
        "part of the training is given per framework",
        "Frameworks use another loss, objective or optimizer. Whether these mean the same is not checked.",
        "Give one for all frameworks, or make sure that they agree and silence this code.",
    ),
    Rule(
        "ISO304",
        _WARNING,
        "weight decay has two meanings",
        "Keras optimizers decouple weight decay from the gradient. torch's own optimizers, which train a"
        " native torch model, add it to the gradient, except for AdamW.",
        "Use `adamw`, which means the same in both, or a portable model, or no weight decay.",
    ),
    Rule(
        "ISO305",
        _WARNING,
        "the strategy is not equal to data parallelism",
        "Replicas take local steps and communicate only now and then, or communicate gradients that are"
        " changed or late. The loss curve depends on the number of replicas by design.",
        "Use `data-parallel` where results must agree.",
    ),
    Rule(
        "ISO306",
        _NOTE,
        "several updates change the same weights",
        "Each update has an optimizer state of its own for them, and one undoes what another does: a"
        " generator that also changes its critic makes the critic worse. An update without `weights` changes"
        " all.",
        "Name the weights of each update by patterns. If they are meant to share some, as in turns of head"
        " and whole model, silence this code.",
    ),
    Rule(
        "ISO307",
        _WARNING,
        "a teacher is trained",
        "Weights with `teacher` in their names are trainable: the optimizer has them, and changes them by"
        " their gradients and its weight decay. Its dropout drops too.",
        "Give the teacher as `frozen: {teacher: ...}`, which objectives get as `step.frozen`; or freeze its"
        " weights by `initial_weights.freeze`. If it is meant to learn, silence this code.",
    ),
    Rule(
        "ISO401",
        _ERROR,
        "the backend cannot be used here",
        "Its packages are missing, or do not fit together.",
        "Do what the finding says. `isotrain doctor` tries every backend.",
    ),
    Rule(
        "ISO402",
        _ERROR,
        "the collective cannot work here",
        "A run with it is refused. NCCL, for example, works between GPUs only. Some frameworks would"
        " silently take another collective, and isotrain does not let them.",
        "Leave out the collective: isotrain then chooses one that works. Or use a machine that has what it"
        " needs.",
    ),
    Rule(
        "ISO403",
        _WARNING,
        "there are more replicas, or stages of these, than GPUs",
        "With `device: auto`, all replicas then run on CPUs. The results agree, but take much longer.",
        "Use fewer replicas or stages. With `device: gpu`, too many of them are an error.",
    ),
    Rule(
        "ISO404",
        _WARNING,
        "there are more replicas, or stages of these, than CPU cores",
        "They take turns on the cores. The results are the same, but the times say nothing about the"
        " backend. A slow step may look like a lost process.",
        "Use fewer replicas or stages.",
    ),
    Rule(
        "ISO405",
        _NOTE,
        "there are more threads than CPU cores",
        "The number of replicas (or their stages) times `threads` is more than the cores. So threads take"
        " turns, which costs time.",
        "Leave out `threads`: the cores are then divided equally.",
    ),
    Rule(
        "ISO406",
        _ERROR,
        "there are fewer GPUs than the run needs",
        "The spec says `device: gpu`, so the run is refused and not moved to CPUs.",
        "Use at most as many replicas as GPUs, or `device: auto`.",
    ),
    Rule(
        "ISO407",
        _WARNING,
        "the state of the model does not fit the memory",
        "Weights, gradients and optimizer state take more than there is. Either those of all replicas here"
        " take more than this machine has, or those of one take more than a GPU has. In a container"
        " or job with a memory limit, that limit counts (cgroup), and the finding names its file. Activations"
        " come on top. Such a run swaps, the system ends it, or the GPU refuses.",
        "Use the strategy that the finding names, fewer replicas on this machine, or a smaller model."
        " `recompute` saves activation memory.",
    ),
    Rule(
        "ISO501",
        _ERROR,
        "the run is refused",
        "Spec, backend, strategy and replicas do not fit together.",
        "Do what the finding says. `isotrain strategies` lists the pairs that fit.",
    ),
    Rule(
        "ISO502",
        _ERROR,
        "the model or the data cannot be made",
        "A separate process loaded the data and built the model as a run does, and failed. What needs them"
        " was not checked.",
        "Fix what the finding quotes, or check without them (`--no-measure`).",
    ),
    Rule(
        "ISO503",
        _NOTE,
        "the backend honours the spec in its own way",
        "This is the backend's own note, which a plan shows too.",
        "Read the note. Change the option that it is about if that matters to you.",
    ),
    Rule(
        "ISO504",
        _ERROR,
        "the first step fails",
        "A separate process took one training step with the spec's loss and metrics, and failed as a run"
        " would.",
        "Fix what the finding quotes. Most often it is the shapes of targets and predictions, or what the"
        " loss returns.",
    ),
)

RULES = {rule.code: rule for rule in _ALL}
"""Every rule by its code."""

CODES = (*GROUPS, *RULES)
"""Groups and single codes that can be silenced."""


def is_silenced(code: str, silenced: Iterable[str]) -> bool:
    """Whether a code is among those silenced, or in a group that is."""
    return any(code.startswith(given) for given in silenced)
