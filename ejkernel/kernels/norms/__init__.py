"""What RMSNorm and LayerNorm share: one is the other without the mean."""
