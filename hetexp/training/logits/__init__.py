"""The cross entropy of many logits, without a copy of them in float32."""
