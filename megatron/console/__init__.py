"""What all console commands share: arguments, standard streams, exits with an error, pictures.

The core does not import it.
"""
