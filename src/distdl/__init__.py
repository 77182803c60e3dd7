"""distdl: model-parallel deep learning for PyTorch, done as linear algebra."""

__version__ = "0.1.0"
