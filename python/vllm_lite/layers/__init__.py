"""Building blocks of models, made of the ops; each names the tensors of its parameters."""
