"""Attention in time linear in length: feature maps that estimate softmax, and the scan over tokens."""
