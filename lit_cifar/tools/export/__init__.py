"""A checkpoint's network as files that other programs run: torch.export and ONNX, compared before they are kept."""
