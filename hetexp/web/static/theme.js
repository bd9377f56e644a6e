// Before anything is drawn: the choice between light and dark that a report's page shares.
"use strict";
try {
  const theme = localStorage.getItem("hetexp-theme");
  if (theme) document.documentElement.dataset.theme = theme;
} catch (error) { /* no storage: the system's choice holds */ }
