export * from './eventually';
export * from './gate';
export * from './processes';
export * from './row-gate';
export * from './servers';
export * from './tcp-proxy';
export * from './test-database';
export * from './lease-app';
