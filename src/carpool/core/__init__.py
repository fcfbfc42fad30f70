"""Pure scheduling core: model, policy interface, scheduler and journal; standard library only, no clock or randomness."""
