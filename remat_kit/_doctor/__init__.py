"""Why does a training script not fit on its chip, and what can be done about it?"""
