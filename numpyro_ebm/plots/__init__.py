"""Pictures of densities, neurons, trainings and chains, with matplotlib.

Each function draws on the axes it is given, or on those of a new figure, and returns them.
"""

from numpyro_ebm.plots.density import plot_density
from numpyro_ebm.plots.neurons import plot_neurons
from numpyro_ebm.plots.training import plot_chains, plot_energies, plot_training

__all__ = ["plot_chains", "plot_density", "plot_energies", "plot_neurons", "plot_training"]
