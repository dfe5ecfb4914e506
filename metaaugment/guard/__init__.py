"""What keeps a step honest: refusals, gradients that are not finite, and passes that leave no trace."""
