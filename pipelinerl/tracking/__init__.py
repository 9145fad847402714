"""Numbers of a run: how they are combined, recorded, shown, plotted and summed up. No torch."""
