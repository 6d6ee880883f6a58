"""FFNs that leave neurons out, PowerInfer's files, and which neurons lie on the accelerator."""
