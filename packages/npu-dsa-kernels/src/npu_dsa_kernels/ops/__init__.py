"""One file an operator: public function, torch.library schema, fake kernel, autograd, dispatch."""
