export { EmbeddedPostgresError, type EmbeddedPostgresErrorCode } from './errors';
export type { EmbeddedPostgres, EmbeddedPostgresOptions, ShutdownMode } from './options';
export { startEmbeddedPostgres } from './start';
