"""Charts: Altair objects for notebooks, and offline pages that carry them.

`words` names cells and numbers and needs no charting library; `theme` is the look all share; `sweeps`, `anatomy`,
`live` and `times` draw; `pages` writes HTML files.
"""
