/*
 * Imported before everything else. The channel to the parent closes when the parent is gone, however it went: then nobody needs this
 * process. Ctrl-C and a closed terminal reach the whole group: they are the parent's to answer, which ends its workers in order.
 */
process.on('disconnect', () => process.exit(1));
process.on('SIGINT', () => undefined);
process.on('SIGHUP', () => undefined);
if (process.send && !process.connected) process.exit(1);
