/** This package's version, as the registry shows it. */
export const VERSION = (require('../package.json') as { version: string }).version;
