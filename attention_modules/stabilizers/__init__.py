"""What keeps attention stable in training, without Lightning: clips, reparametrized weights, penalties of the map."""
