"""The loss of a policy estimated without running the model: ESTIMATED, from what was substituted.

`QualityModel` is fitted to emulated runs (`model`; arithmetic in `fit`, draws of clusters in `draws`); `quality_rows`, above, turns
runs into the rows that it is fitted to and asked about.
"""

from moecache.quality.model import QualityEstimate, QualityModel

__all__ = ["QualityEstimate", "QualityModel"]
