#!/usr/bin/env node
require('../dist/cli.js').main(process.argv.slice(2));
