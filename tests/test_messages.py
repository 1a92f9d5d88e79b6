"""A value that an option cannot have: what was given, what it can be, and what may have been meant."""

import pytest
from commands import TINY, run_here

# The flags, and words that the answer has.
REFUSED = {
    "union of types": (["--data.num_train=many"], ["--data.num_train=many must be a whole number or null"]),
    "union of choices": (["--trainer.precision=bf16mixed"], ["did you mean --trainer.precision=bf16-mixed?"]),
    "union in a class": (
        ["--trainer.strategy=PipelineStrategy", "--trainer.strategy.num_stages=x"],
        ["--trainer.strategy.num_stages=x must be a whole number or null"],
    ),
    "duration": (
        ["--trainer.strategy=PipelineStrategy", "--trainer.strategy.timeout=soon"],
        ["--trainer.strategy.timeout=soon must be a duration, as 0:10:00"],
    ),
    "choice in a class": (
        ["--trainer.strategy=PipelineStrategy", "--trainer.strategy.schedule=1F2B"],
        ["GPipe, 1F1B", "did you mean --trainer.strategy.schedule=1F1B?"],
    ),
    "data set": (
        ["--data.dataset=fashion-mnist"],
        ["cifar10, fashion_mnist, synthetic, folder", "did you mean --data.dataset=fashion_mnist?"],
    ),
    "network": (["--model.arch=resnet43"], ["did you mean --model.arch=resnet34?"]),
    "truth": (["--data.augment=maybe"], ["--data.augment=maybe must be true or false"]),
    "optimizer": (
        ["--model.optimizer=AdmaW", "--model.optimizer.lr=1"],
        ["--model.optimizer=AdmaW: there is no such class", "did you mean --model.optimizer=AdamW?"],
    ),
    "optimizer by its path": (["--model.optimizer=torch.optim.Sgd"], ["did you mean --model.optimizer=SGD?"]),
    "schedule": (["--model.lr_scheduler=steplr"], ["did you mean --model.lr_scheduler=StepLR?"]),
    "callback": (["--trainer.callbacks+=EarlyStoping"], ["did you mean --trainer.callbacks=EarlyStopping?"]),
    "class of a strategy": (
        ["--trainer.strategy=PipelineStrategi"],
        ["did you mean --trainer.strategy=PipelineStrategy?", "the known ones: ddp, "],
    ),
    "nothing alike": (["--model.optimizer=qqq"], ["--model.optimizer=qqq: there is no such class", "--help"]),
    "no batch": (["--data.batch_size=0"], ["--data.batch_size=0 is the global batch", "pass --data.batch_size=128"]),
    "classes": (["--model.num_classes=11"], ["synthetic has 10", "--model.num_classes=10"]),
}


@pytest.mark.parametrize(("flags", "words"), REFUSED.values(), ids=REFUSED.keys())
def test_the_answer_names_value_choices_and_what_may_have_been_meant(flags: list[str], words: list[str]) -> None:
    result = run_here("fit", *TINY, *flags)
    assert result.status == 2
    assert all(word in result.stderr for word in words), result.stderr
    assert "Errors:" not in result.stderr
    assert "divide" not in result.stderr
    assert "class '" not in result.stderr
