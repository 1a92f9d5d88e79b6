"""Properties of a training that a process notes in its trace and that relations must know, as reasons in words."""

UNDIVIDED = "the batches are neither divided along dimension 0 nor lists of samples"
UNDIVIDED_EVALUATION = f"{UNDIVIDED} where no gradient is made"
IN_STEP = "a step draws random numbers for its batch: draw them in the data set"
IN_EVALUATION = "the evaluation draws random numbers from a generator of its own"
BESIDE_EVALUATION = "the same, before or after it reads a loader, such as for the data themselves"
IN_MODEL = "the model draws random numbers in the evaluation, such as noise, or by dropout that is left on"
ROUNDED = "the script rounds values to 16 bits, and other batches round to others"
OF_BATCH = "a BatchNorm keeps no running statistics, so that other batches compute other values"
FOLLOWS_EVALUATION = "the training follows its evaluations (EarlyStopping, ReduceLROnPlateau)"
PARTS = "ranks hold parts of tensors"
MANUAL = "manual optimization accumulates by itself: a plain script can call relations.knob"
NO_LOADER = "it reads no DataLoader of torch"  # is never noted: what no process has seen
