"""A physics-informed network by LBFGS: points are drawn before the closure, which needs gradients of the inputs."""

import torch
from torch import nn

from lit_cifar import relations

STEPS = 10


def residual(model: nn.Module, places: torch.Tensor) -> torch.Tensor:
    """Of u' = -u with u(0) = 1."""
    places = places.requires_grad_()
    value = model(places)
    (slope,) = torch.autograd.grad(value.sum(), places, create_graph=True)
    return (slope + value).square().mean() + (model(torch.zeros(1, 1)) - 1).square().mean()


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=5, line_search_fn="strong_wolfe")
    first = 0
    if path := relations.resume():
        saved = torch.load(path, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        torch.set_rng_state(saved["random"])
        first = saved["step"]
    for step in range(first, STEPS):
        places = 2 * torch.rand(64, 1)

        def closure(places: torch.Tensor = places) -> torch.Tensor:
            optimizer.zero_grad()
            loss = residual(model, places.clone())
            loss.backward()
            return loss

        optimizer.step(closure)
        grid = torch.linspace(0, 2, 50).unsqueeze(1)
        with torch.no_grad():
            error = (model(grid) - (-grid).exp()).abs().max().item()
        relations.report(val_error=error)
        if path := relations.save():
            states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(states | {"random": torch.get_rng_state(), "step": step + 1}, path)


if __name__ == "__main__":
    main()
