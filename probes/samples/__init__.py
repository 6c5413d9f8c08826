"""What a rank trained on: fingerprints of batches, contents of samples, and the samplers that drew them."""
