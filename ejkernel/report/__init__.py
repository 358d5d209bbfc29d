"""Reports: the results of tunings, as one page that needs no network."""

from ejkernel.report.page import render as render
from ejkernel.report.summary import summarise as summarise
