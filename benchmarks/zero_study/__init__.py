"""ZeRO's stages on mT5s, predicted and measured."""
