"""PyTorch's side of the platform layer; `mindspore` mirrors it file by file."""
