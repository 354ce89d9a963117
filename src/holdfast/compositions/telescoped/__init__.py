"""Networks as polynomials in the perturbation, with a proved bound of what the polynomials leave out."""
