"""What every task trains with: hyper-parameters as plain data, optimizers, mixup, metrics, sums over processes."""
