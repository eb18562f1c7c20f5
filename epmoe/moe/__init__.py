"""EPMoE: its module, training, placement of experts, checkpoints, and the experts beside DDP and FSDP."""
